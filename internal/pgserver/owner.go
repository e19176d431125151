package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
)

// socketPathLimit is the shortest limit among the systems we know, macOS's, without the ending zero.
const socketPathLimit = 103

// owner is the user the server runs as. The zero value is the user of this process.
type owner struct {
	uid, gid int
	// become is the argv in front of a command that root runs as this user; empty for ourselves.
	become []string
}

// findOwner returns ourselves, or another user if we are root, which initdb and postgres refuse.
func findOwner(ctx context.Context) (owner, error) {
	if os.Geteuid() != 0 {
		return owner{}, nil
	}
	faults := []error{errors.New("PostgreSQL does not run as root, and no other user can be used")}
	for _, name := range []string{"postgres", "_postgres", "nobody"} {
		account, err := user.Lookup(name)
		if err != nil {
			faults = append(faults, err)
			continue
		}
		uid, uidErr := strconv.Atoi(account.Uid)
		gid, gidErr := strconv.Atoi(account.Gid)
		if err := errors.Join(uidErr, gidErr); err != nil || uid <= 0 {
			faults = append(faults, fmt.Errorf("user %s: uid %s, gid %s", name, account.Uid, account.Gid))
			continue
		}
		// su and runuser may open a login session, which is why they come after setpriv.
		for _, become := range [][]string{
			{"setpriv", "--reuid=" + account.Uid, "--regid=" + account.Gid, "--clear-groups", "--"},
			{"runuser", "-u", name, "--"},
			{"su", "-s", "/bin/sh", "-c", `exec "$0" "$@"`, "--", name},
			{"sudo", "-n", "-u", name, "--"},
		} {
			found := owner{uid: uid, gid: gid, become: become}
			if err := found.run(ctx, "true"); err != nil {
				faults = append(faults, fmt.Errorf("%s as %s: %w", become[0], name, err))
				continue
			}
			return found, nil
		}
	}
	return owner{}, errors.Join(faults...)
}

// run runs a shell text as the owner.
func (o owner) run(ctx context.Context, text string, args ...string) error {
	argv := append(append([]string{}, o.become...), "/bin/sh", "-c", text, "sh")
	command := exec.CommandContext(ctx, argv[0], append(argv[1:], args...)...)
	command.Dir = "/"
	return command.Run()
}

// give makes the owner the owner of a file.
func (o owner) give(path string) error {
	if len(o.become) == 0 {
		return nil
	}
	return os.Chown(path, o.uid, o.gid)
}

// function is the shell function by which the control script runs a command as the owner.
func (o owner) function() string {
	if len(o.become) == 0 {
		return `as_owner() { "$@"; }`
	}
	quoted := make([]string, len(o.become))
	for i, word := range o.become {
		quoted[i] = quote(word)
	}
	return `as_owner() { if [ "$(id -u)" = 0 ]; then ` + strings.Join(quoted, " ") + ` "$@"; else "$@"; fi; }`
}

// makeDir makes the server's directory where its owner can reach it, which a temporary directory
// inside root's home is not, and where the path of its socket is not too long.
func makeDir(ctx context.Context, wanted, binDir string, owner owner) (string, error) {
	if wanted != "" {
		return claimDir(ctx, wanted, binDir, owner)
	}
	var faults []error
	for _, parent := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		dir, err := os.MkdirTemp(parent, "pgserver-")
		if err == nil {
			if err = usable(ctx, dir, binDir, owner); err == nil {
				return dir, nil
			}
			err = errors.Join(err, os.Remove(dir))
		}
		faults = append(faults, err)
	}
	return "", errors.Join(faults...)
}

// claimDir takes a directory the caller chose. One that holds anything is refused, because everything
// in it is removed in the end.
func claimDir(ctx context.Context, wanted, binDir string, owner owner) (string, error) {
	dir, err := filepath.Abs(wanted)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	if len(entries) > 0 {
		return "", fmt.Errorf("directory %s is not empty", dir)
	}
	if err := usable(ctx, dir, binDir, owner); err != nil {
		return "", errors.Join(err, os.Remove(dir))
	}
	return dir, nil
}

func usable(ctx context.Context, dir, binDir string, owner owner) error {
	if socket := filepath.Join(dir, ".s.PGSQL.65535"); len(socket) > socketPathLimit {
		return fmt.Errorf("directory %s: path of the socket in it would be too long", dir)
	}
	if err := owner.give(dir); err != nil {
		return err
	}
	if err := owner.run(ctx, `test -w "$1" && test -x "$1"`, dir); err != nil {
		return fmt.Errorf("directory %s is out of reach for the server's user: %w", dir, err)
	}
	if err := owner.run(ctx, `test -x "$1"`, filepath.Join(binDir, "postgres")); err != nil {
		return fmt.Errorf("binaries in %s are out of reach for the server's user: %w", binDir, err)
	}
	return nil
}

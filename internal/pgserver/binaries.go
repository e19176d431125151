package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// ErrNoBinaries is returned when no PostgreSQL server is installed. The error's text names the command
// that installs one.
var ErrNoBinaries = errors.New("no PostgreSQL server binaries found")

// binDirs are where packages put the binaries without putting them on the PATH.
var binDirs = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/libexec/postgresql*",
	"/usr/local/pgsql/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/opt/local/lib/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/usr/bin",
	"/usr/local/bin",
}

// system is the machine as findBinaries sees it.
var system = machine{
	lookPath: exec.LookPath,
	glob:     filepath.Glob,
	pgConfig: func(ctx context.Context) (string, error) {
		output, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output()
		return strings.TrimSpace(string(output)), err
	},
	goos: runtime.GOOS,
	exists: func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	},
}

type machine struct {
	lookPath func(name string) (string, error)
	glob     func(pattern string) ([]string, error)
	pgConfig func(ctx context.Context) (binDir string, err error)
	exists   func(path string) bool
	goos     string
}

// findBinaries returns the directory of initdb, pg_ctl and postgres: the one on the PATH, else the one
// pg_config names, else the highest version in a usual place.
func findBinaries(ctx context.Context, on machine) (string, error) {
	complete := func(dir string) bool {
		for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
			if !on.exists(filepath.Join(dir, name)) {
				return false
			}
		}
		return true
	}
	for _, name := range []string{"postgres", "initdb", "pg_ctl"} {
		path, err := on.lookPath(name)
		if err != nil {
			continue
		}
		// The PATH may hold links only, and PostgreSQL looks for its files beside the real ones.
		if path, err = filepath.EvalSymlinks(path); err == nil && complete(filepath.Dir(path)) {
			return filepath.Dir(path), nil
		}
	}
	if dir, err := on.pgConfig(ctx); err == nil && complete(dir) {
		return dir, nil
	}
	for _, pattern := range binDirs {
		dirs, err := on.glob(pattern)
		if err != nil {
			return "", fmt.Errorf("find PostgreSQL: %w", err)
		}
		dirs = slices.DeleteFunc(dirs, func(dir string) bool { return !complete(dir) })
		if len(dirs) > 0 {
			return slices.MaxFunc(dirs, func(a, b string) int { return slices.Compare(version(a), version(b)) }), nil
		}
	}
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("find PostgreSQL: %w", err)
	}
	return "", fmt.Errorf("%w; install them with: %s", ErrNoBinaries, installCommand(on))
}

var numbers = regexp.MustCompile(`\d+`)

// version is all numbers of a path, so that 16 is above 9.6.
func version(path string) []int {
	var found []int
	for _, text := range numbers.FindAllString(path, -1) {
		number, err := strconv.Atoi(text)
		if err != nil {
			return found
		}
		found = append(found, number)
	}
	return found
}

func installCommand(on machine) string {
	switch {
	case on.goos == "darwin":
		return "brew install postgresql@16"
	case on.goos == "freebsd":
		return "pkg install -y postgresql16-server"
	case on.exists("/etc/alpine-release"):
		return "apk add postgresql"
	case on.exists("/etc/redhat-release"):
		return "dnf install -y postgresql-server"
	case on.exists("/etc/arch-release"):
		return "pacman -S --noconfirm postgresql"
	case on.exists("/etc/SUSE-brand"):
		return "zypper install -y postgresql-server"
	default:
		return "apt-get install -y postgresql"
	}
}

// Program is the path of one of PostgreSQL's client programs (pg_dump, pg_restore): beside the server's binaries, or on
// the PATH.
func Program(ctx context.Context, name string) (string, error) {
	if dir, err := findBinaries(ctx, system); err == nil {
		if path := filepath.Join(dir, name); system.exists(path) {
			return path, nil
		}
	}
	path, err := system.lookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is not installed; install it with: %s", name, installCommand(system))
	}
	return path, nil
}

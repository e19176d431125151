package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	embedded "github.com/fergusstrange/embedded-postgres"
)

// downloadBudget is how long a download may take.
const downloadBudget = time.Minute

// download fetches binaries into the user's cache, unless they are there already, and returns their
// directory. None is the fault that made it necessary, and says how to do without it.
func download(ctx context.Context, none error) (string, error) {
	if os.Geteuid() == 0 {
		return "", fmt.Errorf("%w (or run this as another user than root: downloaded binaries would "+
			"lie where the server's user cannot reach them)", none)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("%w; nor is there a place to download them to: %w", none, err)
	}
	binDir, err := unpack(ctx, filepath.Join(cache, "watermill-eventlog", "postgresql-"+string(embedded.V16)))
	if err != nil {
		return "", fmt.Errorf("%w; downloading them failed: %w", none, err)
	}
	return binDir, nil
}

// unpack has embedded-postgres fetch and unpack its binaries into dir, and not start them: a server of
// its own would outlive this process if that died. The data directory lies inside a regular file, so
// that Start ends where it would make it, which is right after unpacking.
//
// A download cannot be interrupted, hence its goroutine stays behind if the context or the budget ends
// first.
func unpack(ctx context.Context, dir string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, downloadBudget,
		fmt.Errorf("no answer within %s", downloadBudget))
	defer cancel()
	if err := ctx.Err(); err != nil {
		return "", err
	}
	port, err := freePort()
	if err != nil {
		return "", err
	}
	scratch, err := os.MkdirTemp("", "pgserver-download-")
	if err != nil {
		return "", err
	}
	blocked := filepath.Join(scratch, "file")
	if err := os.WriteFile(blocked, nil, 0o600); err != nil {
		return "", errors.Join(err, os.RemoveAll(scratch))
	}
	source := embedded.NewDatabase(embedded.DefaultConfig().
		Version(embedded.V16).
		Port(uint32(port)).
		BinariesPath(dir).
		RuntimePath(filepath.Join(scratch, "run")).
		DataPath(filepath.Join(blocked, "data")).
		Logger(io.Discard))

	done := make(chan error, 1)
	go func() {
		err := source.Start()
		done <- errors.Join(err, os.RemoveAll(scratch))
	}()
	select {
	case <-ctx.Done():
		return "", context.Cause(ctx)
	case err = <-done:
	}
	binDir := filepath.Join(dir, "bin")
	for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
		if !system.exists(filepath.Join(binDir, name)) {
			return "", errors.Join(fmt.Errorf("no %s in %s", name, binDir), err)
		}
	}
	return binDir, nil
}

package pgserver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// bare is a machine without PostgreSQL that has the given files.
func bare(goos string, files ...string) machine {
	return machine{
		lookPath: func(string) (string, error) { return "", errors.New("not on the PATH") },
		glob:     func(string) ([]string, error) { return nil, nil },
		pgConfig: func(context.Context) (string, error) { return "", errors.New("no pg_config") },
		exists:   func(path string) bool { return slices.Contains(files, path) },
		goos:     goos,
	}
}

func binaries(dir string) []string {
	return []string{dir + "/initdb", dir + "/pg_ctl", dir + "/postgres"}
}

func TestMissingBinariesNameTheInstallCommand(t *testing.T) {
	t.Parallel()
	for command, on := range map[string]machine{
		"apt-get install -y postgresql":       bare("linux"),
		"apk add postgresql":                  bare("linux", "/etc/alpine-release"),
		"dnf install -y postgresql-server":    bare("linux", "/etc/redhat-release"),
		"brew install postgresql@16":          bare("darwin"),
		"pkg install -y postgresql16-server":  bare("freebsd"),
		"pacman -S --noconfirm postgresql":    bare("linux", "/etc/arch-release"),
		"zypper install -y postgresql-server": bare("linux", "/etc/SUSE-brand"),
	} {
		_, err := findBinaries(t.Context(), on)
		assert.ErrorIs(t, err, ErrNoBinaries)
		assert.ErrorContains(t, err, command)
	}
}

func TestHighestVersionIsFound(t *testing.T) {
	t.Parallel()
	var files []string
	dirs := []string{"/usr/lib/postgresql/9.6/bin", "/usr/lib/postgresql/15/bin", "/usr/lib/postgresql/16/bin"}
	for _, dir := range dirs {
		files = append(files, binaries(dir)...)
	}
	on := bare("linux", files...)
	// Version 17 has only its client installed.
	on.glob = func(string) ([]string, error) { return append(dirs, "/usr/lib/postgresql/17/bin"), nil }
	dir, err := findBinaries(t.Context(), on)
	require.NoError(t, err)
	assert.Equal(t, "/usr/lib/postgresql/16/bin", dir)
}

func TestPgConfigIsAskedBeforeUsualPlaces(t *testing.T) {
	t.Parallel()
	on := bare("linux", binaries("/srv/pg/bin")...)
	on.pgConfig = func(context.Context) (string, error) { return "/srv/pg/bin", nil }
	dir, err := findBinaries(t.Context(), on)
	require.NoError(t, err)
	assert.Equal(t, "/srv/pg/bin", dir)
}

func TestLinkOnThePathLeadsToItsDirectory(t *testing.T) {
	t.Parallel()
	root, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	real := filepath.Join(root, "real")
	require.NoError(t, os.Mkdir(real, 0o700))
	for _, path := range binaries(real) {
		require.NoError(t, os.WriteFile(path, nil, 0o700))
	}
	link := filepath.Join(root, "postgres")
	require.NoError(t, os.Symlink(filepath.Join(real, "postgres"), link))

	on := system
	on.lookPath = func(string) (string, error) { return link, nil }
	dir, err := findBinaries(t.Context(), on)
	require.NoError(t, err)
	assert.Equal(t, real, dir)
}

func TestUnpackedBinariesAreUsedWithoutStartingThem(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir()) // embedded-postgres leaves its log there
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "bin"), 0o700))
	ran := filepath.Join(dir, "ran")
	for _, path := range binaries(filepath.Join(dir, "bin")) {
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n: >"+quote(ran)+"\n"), 0o700))
	}
	binDir, err := unpack(t.Context(), dir)
	require.NoError(t, err)
	assert.Equal(t, filepath.Join(dir, "bin"), binDir)
	assert.NoFileExists(t, ran)
}

func TestFailedDownloadSaysHowToDoWithout(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	none := errors.New("install with: this")
	_, err := download(cancelled, none)
	assert.ErrorIs(t, err, none)
}

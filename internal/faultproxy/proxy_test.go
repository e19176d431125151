package faultproxy_test

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/watermill-eventlog/watermill-eventlog/internal/faultproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a server that answers what it is sent, and tells when a connection of its has ended.
func echo(t *testing.T) (address string, ended <-chan error) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ends := make(chan error, 100)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				_, err := io.Copy(conn, conn)
				ends <- err
				_ = conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		all.Wait()
	})
	return listener.Addr().String(), ends
}

func dial(t *testing.T, p *faultproxy.Proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ask returns the error of an exchange.
func ask(conn net.Conn, patience time.Duration) error {
	if _, err := conn.Write([]byte("hello")); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	answer := make([]byte, 5)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if string(answer) != "hello" {
		return errors.New("the answer differs")
	}
	return nil
}

const patience = 20 * time.Second

func open(t *testing.T, p *faultproxy.Proxy, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return p.Open() == n }, patience, time.Millisecond)
}

func TestPassesBothWaysAndTellsOfTheEnd(t *testing.T) {
	t.Parallel()
	address, ended := echo(t)
	p := faultproxy.New(t, address)
	conn := dial(t, p)
	require.NoError(t, ask(conn, patience))
	require.NoError(t, ask(conn, patience))
	require.NoError(t, conn.Close())
	require.NoError(t, <-ended)
	open(t, p, 0)
	require.Equal(t, 1, p.Accepted())
}

func TestResetEndsBothSides(t *testing.T) {
	t.Parallel()
	address, ended := echo(t)
	p := faultproxy.New(t, address)
	conn := dial(t, p)
	require.NoError(t, ask(conn, patience))
	p.Reset()
	require.ErrorIs(t, ask(conn, patience), syscall.ECONNRESET)
	require.ErrorIs(t, <-ended, syscall.ECONNRESET)
	require.NoError(t, ask(dial(t, p), patience), "a new one passes")
}

func TestRefusedConnectionsEndAtOnceAndOpenOnesGoOn(t *testing.T) {
	t.Parallel()
	address, _ := echo(t)
	p := faultproxy.New(t, address)
	before := dial(t, p)
	require.NoError(t, ask(before, patience))
	p.Refuse()
	refused := ask(dial(t, p), patience)
	require.Error(t, refused)
	require.NotErrorIs(t, refused, os.ErrDeadlineExceeded)
	require.NoError(t, ask(before, patience))
	p.Pass()
	require.NoError(t, ask(dial(t, p), patience))
	require.Equal(t, 3, p.Accepted())
}

func TestDroppedConnectionsAreSilentToBothSidesForGood(t *testing.T) {
	t.Parallel()
	address, ended := echo(t)
	p := faultproxy.New(t, address)
	before := dial(t, p)
	require.NoError(t, ask(before, patience))
	p.Drop()
	meanwhile := dial(t, p)
	require.ErrorIs(t, ask(before, 50*time.Millisecond), os.ErrDeadlineExceeded)
	require.ErrorIs(t, ask(meanwhile, 50*time.Millisecond), os.ErrDeadlineExceeded)
	p.Pass()
	require.ErrorIs(t, ask(before, 50*time.Millisecond), os.ErrDeadlineExceeded)
	require.NoError(t, ask(dial(t, p), patience))
	require.NoError(t, before.Close())
	open(t, p, 2)
	require.Empty(t, ended, "the server has not heard of it")
}

func TestDelayHoldsBack(t *testing.T) {
	t.Parallel()
	address, _ := echo(t)
	p := faultproxy.New(t, address)
	conn := dial(t, p)
	p.Delay(30 * time.Millisecond)
	started := time.Now()
	require.NoError(t, ask(conn, patience))
	require.GreaterOrEqual(t, time.Since(started), 60*time.Millisecond, "there and back")
}

package main

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// wire counts round trips on the connections of a pool: each time the client reads an answer to what it has written.
type wire struct{ trips atomic.Int64 }

func (w *wire) count(config *pgxpool.Config) {
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: conn, wire: w}, nil
	}
}

type countedConn struct {
	net.Conn
	wire  *wire
	asked atomic.Bool
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.asked.Store(true)
	return c.Conn.Write(p)
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.asked.Swap(false) {
		c.wire.trips.Add(1)
	}
	return n, err
}

// farAway passes connections on to a server, each way late, until stop.
func farAway(target string, late time.Duration) (addr string, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				_ = client.Close()
				continue
			}
			all.Go(func() { passOn(server, client, late) })
			all.Go(func() { passOn(client, server, late) })
		}
	})
	return listener.Addr().String(), func() { _ = listener.Close(); all.Wait() }, nil
}

// passOn returns when the source ends, or the target does.
func passOn(to, from net.Conn, late time.Duration) {
	type piece struct {
		due  time.Time
		text []byte
	}
	under := make(chan piece, 10_000)
	go func() {
		defer close(under)
		for {
			text := make([]byte, 64<<10)
			n, err := from.Read(text)
			if n > 0 {
				under <- piece{time.Now().Add(late), text[:n]}
			}
			if err != nil {
				return
			}
		}
	}()
	var err error
	for p := range under {
		if err != nil {
			continue
		}
		time.Sleep(time.Until(p.due))
		if _, err = to.Write(p.text); err != nil {
			_ = from.Close()
		}
	}
	_ = to.Close()
}

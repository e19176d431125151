// Package faultproxy puts a TCP proxy between a test's client and its server, which can be told to fail the way
// networks do. What passes it is bytes: it knows no protocol.
package faultproxy

import (
	"errors"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Proxy passes connections on to a server until it is told otherwise. Its methods may be called from several
// goroutines.
type Proxy struct {
	listener net.Listener
	target   string
	done     chan struct{}
	all      sync.WaitGroup

	mu       sync.Mutex
	mode     mode
	delay    time.Duration
	accepted int
	links    map[*link]struct{}
}

type mode int

const (
	passing mode = iota
	refusing
	dropping
)

// link is one connection of a client, with the one to the server that belongs to it. It is under the proxy's mutex.
type link struct {
	client, server *net.TCPConn // no server where the connection was not passed on
	lost           bool         // its bytes vanish, for good
	ended          bool         // the client has closed it, or was told to
}

// New starts a proxy before the server at target, a host and port, which ends in cleanup.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: listener, target: target, done: make(chan struct{}), links: map[*link]struct{}{}}
	var accepting sync.WaitGroup
	accepting.Go(p.accept)
	t.Cleanup(func() {
		close(p.done)
		_ = listener.Close()
		accepting.Wait()
		p.Reset()
		p.all.Wait()
	})
	return p
}

// For is a proxy before the server of a URL, and the URL by way of it.
func For(t testing.TB, address string) (*Proxy, string) {
	t.Helper()
	parsed, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	p := New(t, parsed.Host)
	parsed.Host = p.Addr()
	return p, parsed.String()
}

// Addr is the host and port to connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Pass makes new connections work.
func (p *Proxy) Pass() { p.set(passing) }

// Refuse resets new connections at once. Those that are open go on.
func (p *Proxy) Refuse() { p.set(refusing) }

// Drop makes the bytes of all connections vanish, without a word to either side. Those that are open then stay
// lost for ever, those that are made before Pass is called as well.
func (p *Proxy) Drop() { p.set(dropping) }

func (p *Proxy) set(m mode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = m
	for l := range p.links {
		l.lost = l.lost || m == dropping
	}
}

// Delay holds back whatever is sent from now on, in both directions. The next piece waits for the one before.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Reset ends all open connections by a reset to both sides.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.reset()
	}
}

// Accepted is how many connections clients have made, with those that were refused.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Open is how many connections the clients have not closed yet.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	open := 0
	for l := range p.links {
		if !l.ended {
			open++
		}
	}
	return open
}

func (l *link) reset() {
	for _, conn := range []*net.TCPConn{l.client, l.server} {
		if conn != nil {
			_ = conn.SetLinger(0)
			_ = conn.Close()
		}
	}
}

// accept returns when the listener is closed, and every link is listed by then.
func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		l := &link{client: client.(*net.TCPConn)}
		p.mu.Lock()
		p.accepted++
		m := p.mode
		l.lost = m == dropping
		p.links[l] = struct{}{}
		p.mu.Unlock()
		p.all.Go(func() { p.serve(l, m) })
	}
}

func (p *Proxy) serve(l *link, m mode) {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		l.reset()
		delete(p.links, l)
	}()
	switch m {
	case refusing:
		return
	case passing:
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			return
		}
		p.mu.Lock()
		l.server = server.(*net.TCPConn)
		p.mu.Unlock()
		var answers sync.WaitGroup
		defer answers.Wait()
		answers.Go(func() { p.pump(l, l.client, l.server) })
	}
	p.pump(l, l.server, l.client)
	p.mu.Lock()
	defer p.mu.Unlock()
	l.ended = true
}

// pump carries bytes until one side ends, and tells the other. Of a lost connection it tells nobody.
func (p *Proxy) pump(l *link, to, from *net.TCPConn) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			p.hold()
		}
		p.mu.Lock()
		lost := l.lost
		p.mu.Unlock()
		if !lost && n > 0 {
			_, writeErr := to.Write(buffer[:n])
			err = errors.Join(err, writeErr)
		}
		if err == nil {
			continue
		}
		if !lost {
			_ = to.Close()
		}
		return
	}
}

func (p *Proxy) hold() {
	p.mu.Lock()
	late := time.NewTimer(p.delay)
	p.mu.Unlock()
	defer late.Stop()
	select {
	case <-late.C:
	case <-p.done:
	}
}

package torture

import (
	"bufio"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"time"
)

const (
	// slowness is how long, at most, a statement is kept back that follows another one in the same trip: so each of
	// them can be met by a fault.
	slowness = 4 * time.Millisecond
	// silence is how long the far end of a connection that went silent is left waiting. A real network has
	// keepalives for that.
	silence = 6 * time.Second
)

// proxy stands between the workers and the server. It knows where messages of the protocol begin, so that a trip of
// several statements can be held, or cut, between two of them.
type proxy struct {
	listener net.Listener
	target   string

	mu     sync.Mutex
	closed bool
	links  map[int]*link // by the port that the server sees
	all    sync.WaitGroup
}

func newProxy(target string) (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: listener, target: target, links: map[int]*link{}}
	p.all.Go(p.accept)
	return p, nil
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.all.Go(func() { p.serve(client.(*net.TCPConn)) })
	}
}

func (p *proxy) serve(client *net.TCPConn) {
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		reset(client)
		return
	}
	l := &link{client: client, server: server.(*net.TCPConn)}
	l.changed.L = &l.mu
	port := server.LocalAddr().(*net.TCPAddr).Port
	p.mu.Lock()
	p.links[port] = l
	if p.closed {
		l.reset()
	}
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(l.up)
	both.Go(l.down)
	both.Wait()
	l.reset()
	p.mu.Lock()
	delete(p.links, port)
	p.mu.Unlock()
}

// link finds a connection by the port that the server sees.
func (p *proxy) link(port int) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.links[port]
}

func (p *proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	for _, l := range p.links {
		l.reset()
	}
	p.mu.Unlock()
	p.all.Wait()
}

// link is one connection through the proxy.
type link struct {
	client, server *net.TCPConn

	mu      sync.Mutex
	changed sync.Cond
	held    bool
	silent  bool // what comes is swallowed, also the end
}

// hold keeps back what comes from either side. It is false if somebody else holds the link, or it is silent.
func (l *link) hold() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held || l.silent {
		return false
	}
	l.held = true
	return true
}

func (l *link) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = false
	l.changed.Broadcast()
}

// vanish makes the link half-open: neither side hears of the other any more, and neither is told.
func (l *link) vanish() {
	l.mu.Lock()
	l.silent = true
	l.mu.Unlock()
	l.release()
	time.AfterFunc(silence, func() { _ = l.server.Close(); _ = l.client.Close() })
}

// reset ends both connections by RST.
func (l *link) reset() {
	reset(l.client)
	reset(l.server)
	l.release()
}

func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
	_ = conn.Close()
}

// pass waits while the link is held; it is false when nothing passes any more.
func (l *link) pass() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held {
		l.changed.Wait()
	}
	return !l.silent
}

// up carries the client's messages to the server, one by one.
func (l *link) up() {
	from := bufio.NewReaderSize(l.client, 64<<10)
	buffer := make([]byte, 0, 64<<10)
	header, started, trip := 4, false, 0 // the first message has no type
	for {
		head, err := from.Peek(header)
		if err != nil {
			break
		}
		size := header - 4 + int(binary.BigEndian.Uint32(head[header-4:]))
		kind := head[0]
		if cap(buffer) < size {
			buffer = make([]byte, size)
		}
		if _, err := io.ReadFull(from, buffer[:size]); err != nil {
			break
		}
		switch {
		case !started:
			started, header = true, 5
		case kind == 'S': // Sync ends a trip
			trip = 0
		case kind == 'B': // Bind begins a statement
			if trip++; trip > 1 {
				time.Sleep(rand.N(slowness))
			}
		}
		if l.pass() {
			if _, err := l.server.Write(buffer[:size]); err != nil {
				break
			}
		}
	}
	if l.pass() {
		_ = l.server.CloseWrite()
	}
}

// down carries what the server says to the client.
func (l *link) down() {
	buffer := make([]byte, 64<<10)
	for {
		n, err := l.server.Read(buffer)
		if n > 0 && l.pass() {
			if _, err := l.client.Write(buffer[:n]); err != nil {
				break
			}
		}
		if err != nil {
			break
		}
	}
	if l.pass() {
		_ = l.client.Close()
		_ = l.server.Close()
	}
}

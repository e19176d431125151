package torture

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// slot is a place for a worker process: when one is gone, the next is started.
type slot struct {
	run    *run
	number int

	mu      sync.Mutex
	process *process
	calm    bool // its writers are to be quiet
	over    bool // no other process is started
}

// startTime is how long a process may take until it handles, or has given up.
const startTime = 30 * time.Second

// fate is how a process is expected to end.
type fate int32

const (
	running fate = iota
	killed
	stopped
)

// process is a worker process, seen from outside.
type process struct {
	slot   *slot
	number int
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	busy   atomic.Bool // a fault is made of it
	fate   atomic.Int32
	ready  atomic.Bool // it is handling
	dying  atomic.Bool // it said that an event kills it
	ended  chan struct{}
}

var processes atomic.Int64

// supervise keeps a process running until the run ends.
func (s *slot) supervise() {
	for {
		p, err := s.start()
		if err != nil {
			s.run.report.violate(KindExit, err.Error())
		}
		if p == nil {
			return
		}
		late := time.NewTimer(startTime)
		select {
		case <-p.ended:
		case <-late.C:
			if !p.ready.Load() {
				s.run.report.violate(KindExit, fmt.Sprintf("worker %d neither began to handle nor ended within %v", p.number, startTime))
			}
			<-p.ended
		}
		late.Stop()
	}
}

// start returns nil when the slot is over.
func (s *slot) start() (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return nil, nil
	}
	p := &process{slot: s, number: int(processes.Add(1)), cmd: exec.Command(program), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), envWorker+"=1")
	p.cmd.Stderr = os.Stderr
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start worker: %w", err)
	}
	settings := workerSettings{
		Number: p.number, Address: s.run.proxy.address(), Seed: s.run.config.Seed + uint64(p.number), Plant: s.run.config.plant, Quiet: s.calm,
	}
	_ = json.NewEncoder(p.stdin).Encode(settings) // fails if it has ended, which is seen below
	s.process = p
	s.run.report.count(&s.run.report.Processes)
	go p.follow(stdout)
	return p, nil
}

// follow reads what the process says until it ends, and judges its end.
func (p *process) follow(stdout io.Reader) {
	r := p.slot.run
	lines := bufio.NewScanner(stdout)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var line workerLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			r.report.violate(KindExit, fmt.Sprintf("worker %d says %q", p.number, lines.Text()))
			continue
		}
		switch {
		case line.Ready:
			p.ready.Store(true)
		case line.Dying > 0:
			p.dying.Store(true)
			r.config.Logf("%v worker %d is killed by event %d", time.Now().Format("15:04:05.000"), p.number, line.Dying)
		case line.Error != "":
			r.report.workerError(p.number, line)
		default:
			r.ledger.add(line)
		}
	}
	err := p.cmd.Wait()
	_ = p.stdin.Close()
	defer close(p.ended)

	var exit *exec.ExitError
	bySignal := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled()
	switch fate(p.fate.Load()) {
	case killed:
	case stopped:
		if byEvent := bySignal && p.dying.Load(); err != nil && !byEvent {
			r.report.violate(KindExit, fmt.Sprintf("worker %d was stopped and ended with: %v", p.number, err))
		}
	case running:
		switch {
		case bySignal && p.dying.Load():
			r.report.count(&r.report.Deaths)
		case !p.ready.Load():
			r.report.count(&r.report.FailedStarts) // the server was down, or a fault hit it before it was ready
			time.Sleep(100 * time.Millisecond)
		default:
			r.report.violate(KindExit, fmt.Sprintf("worker %d ended by itself: %v", p.number, err))
		}
	}
}

func (p *process) expect(f fate)           { p.fate.Store(int32(f)) }
func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // fails only if it has ended

// wait waits until the process has ended, and kills it if that takes too long.
func (p *process) wait(d time.Duration) {
	late := time.NewTimer(d)
	defer late.Stop()
	select {
	case <-p.ended:
	case <-late.C:
		p.slot.run.report.violate(KindExit, fmt.Sprintf("worker %d did not stop within %v", p.number, d))
		p.signal(syscall.SIGKILL)
		<-p.ended
	}
}

// process finds a running one by its number.
func (r *run) process(number int) *process {
	for _, s := range r.slots {
		s.mu.Lock()
		p := s.process
		s.mu.Unlock()
		if p != nil && p.number == number && p.ready.Load() {
			select {
			case <-p.ended:
			default:
				return p
			}
		}
	}
	return nil
}

// quiet ends the slot's writers.
func (s *slot) quiet() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calm = true
	if s.process != nil {
		_, _ = io.WriteString(s.process.stdin, "quiet\n") // fails if it has ended
	}
}

// stop ends the slot's process as an operator would, for good, once it is handling.
func (s *slot) stop() {
	s.mu.Lock()
	s.over = true
	p := s.process
	s.mu.Unlock()
	for began := time.Now(); !p.ready.Load() && time.Since(began) < stopTime; {
		time.Sleep(10 * time.Millisecond)
	}
	p.expect(stopped)
	p.signal(syscall.SIGTERM)
	p.wait(stopTime)
}

// kill ends the slot's process, if it is still there, for good.
func (s *slot) kill() {
	s.mu.Lock()
	s.over = true
	p := s.process
	s.mu.Unlock()
	if p == nil {
		return
	}
	p.expect(killed)
	p.signal(syscall.SIGKILL)
	<-p.ended
}

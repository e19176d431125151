package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// stopBudget is how long a worker may take to stop before it is killed.
const stopBudget = 20 * time.Second

// process is a worker: this program once more, as another process.
type process struct {
	number int
	cmd    *exec.Cmd
	stdin  io.Closer
	ended  chan struct{}
	err    error // why it ended, once it has
}

// startWorker starts a process. It ends by stop or kill, or when this process is gone.
func startWorker(number int, s workerSettings, out *display) (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{number: number, cmd: exec.Command(program, workerCommand), ended: make(chan struct{})}
	p.cmd.Stderr = &lineWriter{line: func(line string) { out.say(p.name(), "says: %s", line) }}
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stdin = stdin
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name(), err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	if err := json.NewEncoder(stdin).Encode(s); err != nil {
		p.kill()
		return nil, fmt.Errorf("start %s: %w", p.name(), err)
	}
	out.say(p.name(), "started, pid %d", p.pid())
	return p, nil
}

func (p *process) name() string { return fmt.Sprintf("worker %d", p.number) }
func (p *process) pid() int     { return p.cmd.Process.Pid }

// kill ends the process as a crash would, and waits until it is gone.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // fails only if it has ended already
	<-p.ended
}

// stop asks the process to finish what it has in hand, and waits until it is gone.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only if it has ended already
	late := time.NewTimer(stopBudget)
	defer late.Stop()
	select {
	case <-p.ended:
	case <-late.C:
		p.kill()
		return fmt.Errorf("%s did not stop within %s and was killed", p.name(), stopBudget)
	}
	if p.err != nil {
		return fmt.Errorf("%s ended badly: %w", p.name(), p.err)
	}
	return nil
}

// lineWriter gives whole lines on.
type lineWriter struct {
	line func(string)
	rest []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		line, rest, found := bytes.Cut(w.rest, []byte("\n"))
		if !found {
			return len(p), nil
		}
		w.line(string(line))
		w.rest = rest
	}
}

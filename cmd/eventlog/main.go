// Eventlog is the operator's program for an event log: what its consumers do, and what can be done about it.
//
//	go run github.com/watermill-eventlog/watermill-eventlog/cmd/eventlog@latest status --database postgres://…
//
// Its verbs are described by eventlog help, and in docs/cli.md. It ends with 0 when all is well, with 1 when something
// failed or was refused, and with 2 when it was called wrongly.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, release := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	p := &program{out: newStream(os.Stdout), err: newStream(os.Stderr), env: os.Getenv}
	code := p.run(ctx, os.Args[1:])
	release()
	os.Exit(code)
}

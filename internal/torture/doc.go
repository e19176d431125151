// Package torture tries to break the event log, for minutes in a test and for hours as a program (cmd/torture).
//
// Worker processes with several consumers and writers work on a throw-away server, behind a slow proxy. Faults are
// aimed at rounds and appends that are under way: processes are killed, frozen and stopped, sessions are ended, the
// server crashes, connections are reset or go silent, and package retention removes the oldest partitions. A fault counts only if the
// server showed the open round or append, and at which step it was, while the fault was made. Meanwhile a checker
// compares in single snapshots what the cursors say with what is in the tables.
//
//	go test -run 'TestTorture$' -v -timeout 1h ./internal/torture -torture.faults 1000
//	go run ./internal/torture/cmd/torture -faults 1000 -v
//
// The seed decides what is done, not when: two runs of a seed are alike and not the same.
package torture

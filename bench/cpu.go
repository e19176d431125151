package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// clientCPU is what this process has used.
func clientCPU() time.Duration {
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage) // never fails
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// ticksPerSecond is the unit of /proc/PID/stat on every Linux that Go runs on.
const ticksPerSecond = 100

// serverCPU is what the server's processes have used, those that have ended included. It is not known without Linux's
// /proc.
func serverCPU(postmaster int) (time.Duration, bool) {
	own, ok := processStat(fmt.Sprintf("/proc/%d/stat", postmaster))
	for ok {
		ticks := own.ended
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			if child, ok := processStat(path); ok && child.parent == postmaster {
				ticks += child.used
			}
		}
		before := own.ended
		if own, ok = processStat(fmt.Sprintf("/proc/%d/stat", postmaster)); ok && own.ended == before { // none ended meanwhile
			return time.Duration(ticks) * time.Second / ticksPerSecond, true
		}
	}
	return 0, false
}

type process struct {
	parent      int
	used, ended int64 // ticks of its own, and of its children that have ended
}

func processStat(path string) (p process, ok bool) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return p, false
	}
	_, rest, _ := strings.Cut(string(raw), ") ") // behind the program's name, which may hold anything but this
	fields := strings.Fields(rest)               // from the third of proc(5): the state
	if len(fields) < 15 {
		return p, false
	}
	number := func(field int) int64 {
		n, err := strconv.ParseInt(fields[field-3], 10, 64)
		ok = ok && err == nil
		return n
	}
	ok = true
	p = process{parent: int(number(4)), used: number(14) + number(15), ended: number(16) + number(17)}
	return p, ok
}

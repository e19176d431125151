package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"
)

// Fault is a kind of fault.
type Fault string

// The faults.
const (
	Kill      Fault = "SIGKILL"   // of the process
	Freeze    Fault = "SIGSTOP"   // of the process, for longer than the bounds, and SIGCONT
	Terminate Fault = "terminate" // pg_terminate_backend
	Restart   Fault = "restart"   // of the server, immediate
	Reset     Fault = "reset"     // of the connection, both sides get RST
	HalfOpen  Fault = "half-open" // of the connection, neither side hears of it
	Retention Fault = "retention" // the oldest partitions are removed
	Stop      Fault = "SIGTERM"   // the process has to exit with 0
)

// faults with how often each is dealt.
var faults = []struct {
	fault Fault
	share int
}{
	{Kill, 4}, {Freeze, 3}, {Terminate, 4}, {Restart, 1}, {Reset, 4}, {HalfOpen, 3}, {Retention, 2}, {Stop, 2},
}

const (
	// injectors make faults at the same time.
	injectors = 3
	// stopTime is how long a process may take to stop. The bounds of what it waits for add up to less.
	stopTime = 20 * time.Second
)

// deal says which fault comes next and at which step it is wanted.
type deal struct {
	mu     sync.Mutex
	random *rand.Rand
	deck   []Fault
	left   int // faults that are still to be dealt
	hits   map[Fault]map[Step]int
}

func newDeal(c Config) *deal {
	d := &deal{random: rand.New(rand.NewPCG(c.Seed, 1<<32)), left: c.Faults, hits: map[Fault]map[Step]int{}}
	for _, f := range faults {
		d.hits[f.fault] = map[Step]int{}
	}
	return d
}

// next is false when all faults were dealt.
func (d *deal) next() (Fault, Step, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left == 0 {
		return "", "", false
	}
	d.left--
	if len(d.deck) == 0 {
		for _, f := range faults {
			for range f.share {
				d.deck = append(d.deck, f.fault)
			}
		}
		d.random.Shuffle(len(d.deck), func(i, j int) { d.deck[i], d.deck[j] = d.deck[j], d.deck[i] })
	}
	fault := d.deck[0]
	d.deck = d.deck[1:]
	// The step that this fault has hit least.
	var step Step
	for _, i := range d.random.Perm(len(steps)) {
		if s := steps[i]; step == "" || d.hits[fault][s] < d.hits[fault][step] {
			step = s
		}
	}
	return fault, step, true
}

// hit notes a fault that counts; one that hit nothing is dealt again.
func (d *deal) hit(fault Fault, step Step, counts bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if counts {
		d.hits[fault][step]++
		return
	}
	d.left++
	d.deck = append(d.deck, fault)
}

// inject makes faults until there are none left or ctx ends.
func (r *run) inject(ctx context.Context, d *deal, random *rand.Rand) {
	for wait(ctx, time.Duration(random.Float64()*2*float64(r.config.Pause))) == nil {
		fault, want, ok := d.next()
		if !ok {
			return
		}
		step, hit := r.fault(ctx, random, fault, want)
		d.hit(fault, step, hit)
		r.report.fault(fault, step, hit)
	}
}

// fault makes one, if it finds what to hit.
func (r *run) fault(ctx context.Context, random *rand.Rand, fault Fault, want Step) (Step, bool) {
	if fault == Restart {
		r.up.Lock()
		defer r.up.Unlock()
	} else {
		r.up.RLock()
		defer r.up.RUnlock()
	}
	var victim *process
	b, l, ok := r.seize(ctx, random, want, func(b backend) bool {
		victim = r.process(b.process)
		return victim != nil && !victim.busy.Load()
	})
	if !ok {
		return "", false
	}
	defer l.release()
	ofProcess := fault == Kill || fault == Freeze || fault == Stop
	if ofProcess && !victim.busy.CompareAndSwap(false, true) {
		return "", false
	}
	r.config.Logf("%v %s of worker %d (pid %d) at %s", time.Now().Format("15:04:05.000"), fault, b.process, b.pid, b.step)
	var err error
	switch fault {
	case Kill:
		victim.expect(killed)
		victim.signal(syscall.SIGKILL)
		<-victim.ended
	case Freeze:
		victim.signal(syscall.SIGSTOP)
		l.release()
		_ = wait(ctx, serverBound+time.Duration(random.IntN(1500))*time.Millisecond)
		victim.signal(syscall.SIGCONT)
		victim.busy.Store(false)
	case Stop:
		victim.expect(stopped)
		victim.signal(syscall.SIGTERM)
		l.release()
		victim.wait(stopTime)
	case Terminate:
		var sent bool
		err = r.pool.QueryRow(ctx, "select pg_terminate_backend($1)", b.pid).Scan(&sent)
		ok = sent
	case Reset:
		l.reset()
	case HalfOpen:
		l.vanish()
	case Retention:
		ok, err = r.removeOldest(ctx, random, l.release)
	case Restart:
		err = r.server.Restart(context.WithoutCancel(ctx), true)
		r.pool.Reset()
	}
	if err != nil && ctx.Err() == nil {
		r.report.violate(KindCheck, fmt.Sprintf("%s: %v", fault, err))
	}
	return b.step, ok && err == nil
}

package subscriber

import "time"

// SetListenTimes makes the runner, before its first subscription, less patient with its LISTEN connection.
func (r *Runner) SetListenTimes(heartbeat, answer, probe time.Duration) {
	r.listenTimes = listenTimes{heartbeat: heartbeat, answer: answer, probe: probe}
}

// Rounds is how many rounds the runner has begun, and whether none is under way or about to be.
func (r *Runner) Rounds() (begun int64, resting bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	resting = len(r.slots) == 0
	for s := range r.subscriptions {
		resting = resting && len(s.woken) == 0
	}
	return r.rounds.Load(), resting
}

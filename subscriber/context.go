package subscriber

import (
	"context"
	"sync"
	"time"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// messageContext is a message's context: it carries what Subscribe's context does, and the unit of work, and ends
// when the message is done with. One is made for each event, so it is one allocation where the context package
// takes several.
type messageContext struct {
	values context.Context // has no end of its own
	unit   *cursor.Unit

	mu   sync.Mutex
	done chan struct{} // made when somebody asks for it
	err  error
}

func (c *messageContext) Deadline() (time.Time, bool) { return time.Time{}, false }

func (c *messageContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done == nil {
		c.done = make(chan struct{})
		if c.err != nil {
			close(c.done)
		}
	}
	return c.done
}

func (c *messageContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *messageContext) Value(key any) any {
	if cursor.IsUnitKey(key) {
		return c.unit
	}
	return c.values.Value(key)
}

func (c *messageContext) cancel() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = context.Canceled
	if c.done != nil {
		close(c.done)
	}
}

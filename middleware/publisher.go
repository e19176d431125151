package middleware

import (
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// QuietPublisher decorates a publisher that is not ours, as a broker's: when it fails with what a handler has
// returned, the round fails with its error, and the router does not log the messages at every attempt.
//
//	router.AddPublisherDecorators(middleware.QuietPublisher)
//
// What it has published before a round fails otherwise stays published, and comes again with the next attempt.
func QuietPublisher(pub message.Publisher) (message.Publisher, error) {
	return quietPublisher{pub}, nil
}

type quietPublisher struct{ message.Publisher }

func (p quietPublisher) Publish(topic string, messages ...*message.Message) error {
	err := p.Publisher.Publish(topic, messages...)
	if err == nil {
		return nil
	}
	for _, m := range messages {
		if unit, ok := cursor.UnitFromContext(m.Context()); ok && unit.Returned() {
			unit.Fail(err)
			return nil // the router acks, and the round fails
		}
	}
	return err
}

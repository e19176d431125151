package nats

import (
	"github.com/ThreeDotsLabs/watermill"
	wmnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/nats-io/nats.go"
)

// NewPublisher is watermill-nats's publisher to JetStream, for publisher.AtCommit: a message's UUID is its Nats-Msg-Id,
// by which the stream drops what it has taken within its Duplicates (two minutes by default). A topic is a subject,
// that a stream must have: none is created. It waits for the stream's acks, each at most for the time that the
// connection's JetStream options say (nats.MaxWait, 5 seconds by default). Closing it closes the connection.
func NewPublisher(conn *nats.Conn, logger watermill.LoggerAdapter, options ...nats.JSOpt) (*wmnats.Publisher, error) {
	return wmnats.NewPublisherWithNatsConn(conn, wmnats.PublisherPublishConfig{
		Marshaler: &wmnats.NATSMarshaler{}, SubjectCalculator: wmnats.DefaultSubjectCalculator,
		JetStream: wmnats.JetStreamConfig{TrackMsgId: true, ConnectOptions: options},
	}, logger)
}

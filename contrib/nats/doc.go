// Package nats relays what a consumer of an event log publishes to NATS JetStream, each message once within the
// stream's duplicate window. It is a module of its own.
//
//	broker, err := nats.NewPublisher(conn, logger)
//	…
//	relay, err := publisher.AtCommit(broker, publisher.RelayConfig{})
//	…
//	router.AddHandler("billing", "orders", orders, "invoices", relay, bill)
package nats

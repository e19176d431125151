// Package river writes what the handlers of an event log return as River jobs, in the unit of work of the event: the
// jobs, what the handler wrote and the consumer's move are one transaction. It is a module of its own.
//
// A handler that wants no Watermill messages inserts its jobs itself, by River's client and the unit's transaction:
//
//	tx, err := unit.Tx(ctx)
//	…
//	_, err = client.InsertTx(ctx, tx, SendInvoice{Order: id}, nil)
package river

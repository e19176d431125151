// Package cursor is the floor of the library: an event log's names, the cursors of its consumers, and the
// round in which a cursor moves.
//
// A round is one PostgreSQL transaction, the unit of work: it locks the cursor's row, reads a batch, proves
// that no number is missing ([PlanRound]), hands out the events one after another, and commits what was
// written, what was buffered and the new position together, or nothing of it. A handler sees of it a [Unit]:
// the transaction without its end.
//
// It knows PostgreSQL through pgx and nothing of Watermill; package subscriber drives the rounds, and package operate
// is what an operator does beside them.
package cursor

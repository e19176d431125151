// Package middleware is what a Watermill router needs to handle the messages of an event log.
//
// [Round] is the one call; its parts can be had alone. It must be the first middleware of the router, so that
// it is the outermost: it sees the handler's true error before the router does, and carries the unit of work
// to what the handler returns. A message that did not come from an event log passes it untouched.
package middleware

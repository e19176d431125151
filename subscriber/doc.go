// Package subscriber reads the event log as a Watermill subscriber. What a handler writes through its unit of
// work, and publishes through publisher.Jobs, happens once; what it does outside the database may happen
// again, because a round that fails is rolled back whole and tried again.
//
// A [Runner] serves the consumers of a process and a log: it listens, polls, and bounds how many rounds run
// at once. Events come to a consumer one after another in the order of their numbers. No event is ever
// skipped by itself: a consumer whose handler fails stands still, visibly, until it succeeds.
//
// It does not promise that two consumers see an event at the same time, nor that a wake comes: polling is the
// promise, LISTEN only makes it quick.
package subscriber

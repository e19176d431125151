// Package publisher turns Watermill messages into rows: [EventLog] appends to the event log, [Jobs] writes a
// handler's messages into watermill-sql's tables, in the unit of work of the event that is handled.
//
// What a publisher takes is committed with the transaction it was given, or not at all. Values that could not
// be read back are refused before any SQL is sent.
package publisher

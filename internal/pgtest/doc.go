// Package pgtest gives each test a PostgreSQL database of its own. The databases live on a throw-away
// server, one for each test process, or on the server that EVENTLOG_TEST_DATABASE names by the URL of
// a database whose user may create others.
//
// Without a server tests fail; they never skip. On a throw-away server nothing is kept. On a named one
// the database of a failed test is kept and its URL logged, and so are the templates.
package pgtest

// Package pgserver runs a throw-away PostgreSQL server from the binaries installed on this machine,
// for tests, benchmarks and examples. A server and its directory are gone after Stop, and soon after
// the process that started it ended in any other way, SIGKILL included.
//
// It does not protect the server: everybody on this machine may connect as its superuser. It works on
// Unix systems only. Run by root, the server belongs to the user postgres or nobody, because
// PostgreSQL refuses root.
package pgserver

// Package compat is tests of Watermill's own components over the library's publishers and subscribers. It is a module
// of its own, as some of those components depend on much. What holds is told in docs/watermill.md.
package compat

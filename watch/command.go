package watch

import (
	"fmt"
	"strings"

	"github.com/watermill-eventlog/watermill-eventlog/cursor"
)

// command is a command line of the program eventlog about one cursor.
func command(verb string, key cursor.Key, args ...any) string {
	line := "eventlog " + verb + " " + quote(key.String())
	for _, arg := range args {
		line += fmt.Sprintf(" %v", arg)
	}
	return line
}

// change is a command that changes something, and has to say why.
func change(verb string, key cursor.Key, args ...any) string {
	return command(verb, key, args...) + ` --reason "..."`
}

// quote is a word that a shell leaves as it is.
func quote(word string) string {
	if strings.Trim(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.@/:") == "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

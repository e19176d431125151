package cursor

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxKeyPart keeps a cursor's key well below what a btree index can hold.
const maxKeyPart = 255

// AllTopics is what a consumer of every topic subscribes to. No event has it for a topic.
const AllTopics = "*"

// Key names a cursor. The three parts are stored as columns, as they are: dots, slashes, case and quotes
// mean nothing in them.
type Key struct {
	Consumer string
	Topic    string // "" is every topic
	Shard    string // "" is unsharded
}

// String is the shown name: the consumer, then "@" and the topic, then "#" and the shard where there are
// such. A part that holds one of those signs is quoted, so that two keys never show the same.
func (k Key) String() string {
	name := shown(k.Consumer)
	if k.Topic != "" {
		name += "@" + shown(k.Topic)
	}
	if k.Shard != "" {
		name += "#" + shown(k.Shard)
	}
	return name
}

func shown(part string) string {
	if strings.ContainsAny(part, `@#"`) {
		return strconv.Quote(part)
	}
	return part
}

// Validate returns all that is wrong with the key.
func (k Key) Validate() error {
	var errs []error
	if k.Consumer == "" {
		errs = append(errs, errors.New("missing consumer name"))
	}
	if k.Topic == AllTopics {
		errs = append(errs, errors.New(`topic "*": in a cursor's key every topic is ""`))
	}
	for _, part := range []struct{ what, value string }{
		{"consumer name", k.Consumer}, {"topic", k.Topic}, {"shard", k.Shard},
	} {
		if len(part.value) > maxKeyPart {
			errs = append(errs, fmt.Errorf("%s has %d bytes, the limit is %d", part.what, len(part.value), maxKeyPart))
		}
		if !utf8.ValidString(part.value) || strings.ContainsRune(part.value, 0) {
			errs = append(errs, fmt.Errorf("%s %q is not valid UTF-8 without NUL", part.what, part.value))
		}
	}
	return errors.Join(errs...)
}

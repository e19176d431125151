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

// Columns are the parts of keys as three parameters of a statement, which puts them together again by
// unnest($1::text[], $2::text[], $3::text[]). They are never nil.
func Columns(keys []Key) (consumers, topics, shards []string) {
	consumers, topics, shards = make([]string, len(keys)), make([]string, len(keys)), make([]string, len(keys))
	for i, k := range keys {
		consumers[i], topics[i], shards[i] = k.Consumer, k.Topic, k.Shard
	}
	return consumers, topics, shards
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

// ParseKey reads what [Key.String] shows.
func ParseKey(name string) (Key, error) {
	var k Key
	rest, err := name, error(nil)
	if k.Consumer, rest, err = shownPart(rest); err == nil && strings.HasPrefix(rest, "@") {
		if k.Topic, rest, err = shownPart(rest[1:]); k.Topic == "" && err == nil {
			err = errors.New(`no topic behind "@"`)
		}
	}
	if err == nil && strings.HasPrefix(rest, "#") {
		if k.Shard, rest, err = shownPart(rest[1:]); k.Shard == "" && err == nil {
			err = errors.New(`no shard behind "#"`)
		}
	}
	if err == nil && rest != "" {
		err = fmt.Errorf("%q is more than a name, a topic and a shard", rest)
	}
	if err = errors.Join(err, k.Validate()); err != nil {
		return Key{}, fmt.Errorf(`cursor %q: %w: write consumer, consumer@topic or consumer@topic#shard, a part with @, # or " as a quoted string`, name, err)
	}
	return k, nil
}

// shownPart takes the first part off a shown name.
func shownPart(name string) (part, rest string, err error) {
	if strings.HasPrefix(name, `"`) {
		quoted, err := strconv.QuotedPrefix(name)
		if err != nil {
			return "", "", errors.New("a quote is not closed")
		}
		part, err = strconv.Unquote(quoted)
		return part, name[len(quoted):], err
	}
	end := strings.IndexAny(name, `@#"`)
	if end < 0 {
		end = len(name)
	}
	return name[:end], name[end:], nil
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

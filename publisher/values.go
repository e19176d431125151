package publisher

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// ValueError is a message, or a topic, that could not be read back as it is. It is returned before any SQL is
// sent.
type ValueError struct {
	Topic  string
	UUID   string // of the message; empty when it is the topic that is refused
	Reason string
}

func (e *ValueError) Error() string {
	if e.UUID == "" {
		return fmt.Sprintf("message for topic %q is refused: %s", e.Topic, e.Reason)
	}
	return fmt.Sprintf("message %q for topic %q is refused: %s", e.UUID, e.Topic, e.Reason)
}

// ErrorType is "invalid_message".
func (e *ValueError) ErrorType() string { return "invalid_message" }

// textReason returns why a string cannot be a PostgreSQL text, or "".
func textReason(what, value string) string {
	switch {
	case strings.ContainsRune(value, 0):
		return what + " contains NUL"
	case !utf8.ValidString(value):
		return what + " is not valid UTF-8"
	}
	return ""
}

// metadataJSON is the metadata as a JSON object, its keys in order, or the reason why it cannot be one. encoding/json
// would replace invalid UTF-8 silently.
func metadataJSON(metadata map[string]string, column string) (encoded, reason string) {
	if len(metadata) == 0 {
		return "{}", ""
	}
	var few [8]string
	keys, size := few[:0], 2
	for k, v := range metadata {
		for _, s := range [...]string{k, v} {
			if !utf8.ValidString(s) {
				return "", fmt.Sprintf("metadata %q is not valid UTF-8", k)
			}
			if column == "jsonb" && strings.IndexByte(s, 0) >= 0 {
				return "", fmt.Sprintf("metadata %q contains NUL, which jsonb cannot hold", k)
			}
		}
		keys, size = append(keys, k), size+len(k)+len(v)+6
	}
	slices.Sort(keys)
	raw := make([]byte, 0, size)
	for i, k := range keys {
		raw = appendJSON(append(raw, "{,"[min(i, 1)]), k)
		raw = appendJSON(append(raw, ':'), metadata[k])
	}
	return string(append(raw, '}')), ""
}

// appendJSON appends a valid string. What needs escapes is left to encoding/json.
func appendJSON(raw []byte, s string) []byte {
	for i := range len(s) {
		if s[i] < ' ' || s[i] == '"' || s[i] == '\\' {
			quoted, _ := json.Marshal(s) // a string is always encoded
			return append(raw, quoted...)
		}
	}
	return append(append(append(raw, '"'), s...), '"')
}

// payloadReason returns why a payload cannot be stored in a json, jsonb or bytea column, or "".
func payloadReason(payload []byte, column string) string {
	switch {
	case column == "bytea":
		return ""
	case len(payload) == 0: // becomes NULL, which is read back as no payload
		return ""
	case !validJSON(payload):
		return "its payload is not JSON, and the table's column is: set GeneratePayloadType of the schema to BYTEA"
	case !utf8.Valid(payload):
		return "its payload is not valid UTF-8"
	case column == "jsonb":
		return jsonbReason(payload)
	}
	return ""
}

// What PostgreSQL's numeric can hold, in decimal digits before and behind the point.
const (
	numericBefore = 131072
	numericBehind = 16383
)

// jsonbReason returns why valid JSON cannot be a jsonb, which keeps strings as text and numbers as numeric.
func jsonbReason(text []byte) string {
	for i := 0; i < len(text); {
		switch c := text[i]; {
		case c == '"':
			n, reason := jsonbString(text[i:])
			if reason != "" {
				return reason
			}
			i += n
		case c == '-', c >= '0' && c <= '9':
			n := 1
			for i+n < len(text) && strings.IndexByte("0123456789.eE+-", text[i+n]) >= 0 {
				n++
			}
			if number := text[i : i+n]; !fitsNumeric(string(number)) {
				return fmt.Sprintf("its payload contains the number %.40s, which jsonb cannot hold", number)
			}
			i += n
		default:
			i++
		}
	}
	return ""
}

// jsonbString returns the length of the string that a text begins with.
func jsonbString(text []byte) (n int, reason string) {
	for i := 1; ; {
		switch {
		case text[i] == '"':
			return i + 1, ""
		case text[i] != '\\':
			i++
		case text[i+1] != 'u':
			i += 2
		default:
			unit := escaped(text[i:])
			switch {
			case unit == 0:
				return 0, `its payload contains \u0000, which jsonb cannot hold`
			case !utf16.IsSurrogate(unit):
				i += 6
			case utf16.DecodeRune(unit, escaped(text[i+6:])) != utf8.RuneError:
				i += 12
			default:
				return 0, fmt.Sprintf("its payload contains %s, half of a surrogate pair, which jsonb cannot hold", text[i:i+6])
			}
		}
	}
}

// escaped is the UTF-16 unit of a \u escape that a text begins with; -1 where there is none.
func escaped(text []byte) rune {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return -1
	}
	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(unit)
}

func fitsNumeric(number string) bool {
	mantissa, exponent := strings.TrimPrefix(number, "-"), 0
	if at := strings.IndexAny(mantissa, "eE"); at >= 0 {
		var err error
		if exponent, err = strconv.Atoi(mantissa[at+1:]); err != nil {
			return false
		}
		mantissa = mantissa[:at]
	}
	before, behind, _ := strings.Cut(mantissa, ".")
	// The exponent is compared first: a sum with it could overflow.
	return exponent <= numericBefore && exponent >= -numericBehind &&
		len(before)+exponent <= numericBefore && len(behind)-exponent <= numericBehind
}

// maxPiece bounds a statement's payloads: PostgreSQL takes no message of 1 GiB, and text formats double bytes.
const maxPiece = 64 << 20

// pieces cuts items into runs of at most so many, which together stay below maxPiece bytes unless a single one
// has more.
func pieces[T any](items []T, most int, size func(T) int) [][]T {
	var cut [][]T
	start, bytes := 0, 0
	for i, item := range items {
		n := size(item)
		if i > start && (i-start == most || bytes+n > maxPiece) {
			cut = append(cut, items[start:i])
			start, bytes = i, 0
		}
		bytes += n
	}
	if start < len(items) {
		cut = append(cut, items[start:])
	}
	return cut
}

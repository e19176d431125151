package publisher

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// ValueError is a message that could not be read back as it is. It is returned before any SQL is sent.
type ValueError struct {
	Topic  string
	UUID   string
	Reason string
}

func (e *ValueError) Error() string {
	return fmt.Sprintf("message %q for topic %q is refused: %s", e.UUID, e.Topic, e.Reason)
}

// ErrorType is "invalid_message".
func (e *ValueError) ErrorType() string { return "invalid_message" }

// text returns why a string cannot be a PostgreSQL text, or "".
func text(what, value string) string {
	switch {
	case strings.ContainsRune(value, 0):
		return what + " contains NUL"
	case !utf8.ValidString(value):
		return what + " is not valid UTF-8"
	}
	return ""
}

// metadataJSON is the metadata as a JSON object. encoding/json would replace invalid UTF-8 silently.
func metadataJSON(metadata map[string]string, nul bool) (encoded, reason string) {
	if len(metadata) == 0 {
		return "{}", ""
	}
	for k, v := range metadata {
		for _, s := range []string{k, v} {
			if !utf8.ValidString(s) {
				return "", fmt.Sprintf("metadata %q is not valid UTF-8", k)
			}
			if !nul && strings.ContainsRune(s, 0) {
				return "", fmt.Sprintf("metadata %q contains NUL, which jsonb cannot hold", k)
			}
		}
	}
	raw, err := json.Marshal(metadata)
	if err != nil {
		return "", fmt.Sprintf("metadata: %v", err)
	}
	return string(raw), ""
}

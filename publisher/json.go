package publisher

import "encoding/json"

// maxPlainDepth is how deeply nested a text may be that validJSON looks at by itself.
const maxPlainDepth = 100

// validJSON is [json.Valid], and several times as fast: each job's payload passes it, and of a large one it was the
// greatest cost. What is nested too deeply for it is left to encoding/json.
func validJSON(text []byte) bool {
	v := jsonText{text: text}
	valid := v.value(0)
	if v.deep {
		return json.Valid(text)
	}
	v.space()
	return valid && v.at == len(text)
}

// jsonText is a text and how far it was looked at.
type jsonText struct {
	text []byte
	at   int
	deep bool
}

func (v *jsonText) space() {
	for v.at < len(v.text) {
		switch v.text[v.at] {
		case ' ', '\t', '\n', '\r':
			v.at++
		default:
			return
		}
	}
}

// next skips space and takes the byte behind it, if it is this one.
func (v *jsonText) next(c byte) bool {
	v.space()
	if v.at < len(v.text) && v.text[v.at] == c {
		v.at++
		return true
	}
	return false
}

func (v *jsonText) value(depth int) bool {
	v.space()
	if depth > maxPlainDepth {
		v.deep = true
		return false
	}
	if v.at == len(v.text) {
		return false
	}
	switch c := v.text[v.at]; c {
	case '"':
		v.at++
		return v.string()
	case '{':
		v.at++
		return v.list('}', func() bool { return v.next('"') && v.string() && v.next(':') && v.value(depth+1) })
	case '[':
		v.at++
		return v.list(']', func() bool { return v.value(depth + 1) })
	case 't':
		return v.word("true")
	case 'f':
		return v.word("false")
	case 'n':
		return v.word("null")
	default:
		return v.number()
	}
}

// list takes what is between the brackets of an object or an array.
func (v *jsonText) list(end byte, item func() bool) bool {
	if v.next(end) {
		return true
	}
	for item() {
		if !v.next(',') {
			return v.next(end)
		}
	}
	return false
}

func (v *jsonText) word(word string) bool {
	if len(v.text)-v.at < len(word) || string(v.text[v.at:v.at+len(word)]) != word {
		return false
	}
	v.at += len(word)
	return true
}

// string takes the rest of a string, with its closing quote.
func (v *jsonText) string() bool {
	for i := v.at; i < len(v.text); i++ {
		switch c := v.text[i]; {
		case c == '"':
			v.at = i + 1
			return true
		case c < ' ':
			return false
		case c == '\\':
			if i++; i == len(v.text) {
				return false
			}
			switch v.text[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				for range 4 {
					if i++; i == len(v.text) || !isHex(v.text[i]) {
						return false
					}
				}
			default:
				return false
			}
		}
	}
	return false
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func (v *jsonText) number() bool {
	v.one('-')
	if !v.one('0') && !v.digits() {
		return false
	}
	if v.one('.') && !v.digits() {
		return false
	}
	if v.one('e') || v.one('E') {
		_ = v.one('+') || v.one('-')
		return v.digits()
	}
	return true
}

// one takes the next byte, if it is this one.
func (v *jsonText) one(c byte) bool {
	if v.at < len(v.text) && v.text[v.at] == c {
		v.at++
		return true
	}
	return false
}

// digits takes one or more.
func (v *jsonText) digits() bool {
	from := v.at
	for v.at < len(v.text) && v.text[v.at] >= '0' && v.text[v.at] <= '9' {
		v.at++
	}
	return v.at > from
}

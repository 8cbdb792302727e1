package gateway

import (
	"encoding/binary"
	"math/bits"
)

// The functions of this file walk over JSON (RFC 8259) from an offset, and return the offset behind what they
// have passed; each byte is looked at once. They take what encoding/json takes, and return errNotJSON for the rest.

// depthMax bounds the nesting, as encoding/json does.
const depthMax = 10_000

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipMembers passes the members of an object from behind its brace to behind the closing one, and calls found with
// each: the key with its quotes, and where the value is. found may be nil.
func skipMembers(b []byte, i, depth int, found func(key []byte, at span)) (int, error) {
	if i = skipSpace(b, i); i < len(b) && b[i] == '}' {
		return i + 1, nil
	}
	for more := true; more; {
		if i = skipSpace(b, i); i == len(b) || b[i] != '"' {
			return i, errNotJSON
		}
		from := i
		var err error
		if i, err = skipString(b, i); err != nil {
			return i, err
		}
		key := b[from:i]
		if i = skipSpace(b, i); i == len(b) || b[i] != ':' {
			return i, errNotJSON
		}
		from = skipSpace(b, i+1)
		if i, err = skipValue(b, from, depth); err != nil {
			return i, err
		}
		if found != nil {
			found(key, span{from, i})
		}
		if i, more, err = skipComma(b, i, '}'); err != nil {
			return i, err
		}
	}
	return i, nil
}

// skipElements passes the elements of an array from behind its bracket to behind the closing one.
func skipElements(b []byte, i, depth int) (int, error) {
	if i = skipSpace(b, i); i < len(b) && b[i] == ']' {
		return i + 1, nil
	}
	for more := true; more; {
		var err error
		if i, err = skipValue(b, skipSpace(b, i), depth); err != nil {
			return i, err
		}
		if i, more, err = skipComma(b, i, ']'); err != nil {
			return i, err
		}
	}
	return i, nil
}

// skipComma passes a comma, behind which there is more, or the end of an object or array.
func skipComma(b []byte, i int, end byte) (next int, more bool, err error) {
	i = skipSpace(b, i)
	switch {
	case i == len(b):
	case b[i] == ',':
		return i + 1, true, nil
	case b[i] == end:
		return i + 1, false, nil
	}
	return i, false, errNotJSON
}

func skipValue(b []byte, i, depth int) (int, error) {
	if i >= len(b) {
		return i, errNotJSON
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		if depth == depthMax {
			return i, errNotJSON
		}
		if b[i] == '{' {
			return skipMembers(b, i+1, depth+1, nil)
		}
		return skipElements(b, i+1, depth+1)
	case 't':
		return skipWord(b, i, "true")
	case 'f':
		return skipWord(b, i, "false")
	case 'n':
		return skipWord(b, i, "null")
	}
	return skipNumber(b, i)
}

func skipWord(b []byte, i int, word string) (int, error) {
	if len(b)-i < len(word) || string(b[i:i+len(word)]) != word {
		return i, errNotJSON
	}
	return i + len(word), nil
}

// skipString passes a string from its first quote.
func skipString(b []byte, i int) (int, error) {
	for i++; ; {
		i = plainUntil(b, i)
		switch {
		case i == len(b) || b[i] < ' ':
			return i, errNotJSON
		case b[i] == '"':
			return i + 1, nil
		}
		if i++; i == len(b) { // behind a backslash
			return i, errNotJSON
		}
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			i++
		case 'u':
			if i++; len(b)-i < 4 || !isHex(b[i:i+4]) {
				return i, errNotJSON
			}
			i += 4
		default:
			return i, errNotJSON
		}
	}
}

func isHex(digits []byte) bool {
	for _, c := range digits {
		if (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'f') {
			return false
		}
	}
	return true
}

// Eight bytes at a time: each with its lowest, and each with its highest bit set.
const (
	lows  = 0x0101010101010101
	highs = 0x8080808080808080
)

// plainUntil returns the offset of the next quote, backslash or control byte, eight bytes at a time: a byte of x is
// zero where (x - lows) &^ x has its highest bit set, and below 32 where x - 32*lows borrows (Mycroft's test; a
// borrow may mark bytes above the first hit, so that only the lowest mark is used).
func plainUntil(b []byte, i int) int {
	for ; len(b)-i >= 8; i += 8 {
		x := binary.LittleEndian.Uint64(b[i:])
		quote, slash := x^('"'*lows), x^('\\'*lows)
		marks := ((quote - lows) &^ quote) | ((slash - lows) &^ slash) | ((x - ' '*lows) &^ x)
		if marks &= highs; marks != 0 {
			return i + bits.TrailingZeros64(marks)/8
		}
	}
	for i < len(b) && b[i] >= ' ' && b[i] != '"' && b[i] != '\\' {
		i++
	}
	return i
}

func skipNumber(b []byte, i int) (int, error) {
	if i < len(b) && b[i] == '-' {
		i++
	}
	from := i
	i = skipDigits(b, i)
	if i == from || (b[from] == '0' && i-from > 1) {
		return i, errNotJSON
	}
	if i < len(b) && b[i] == '.' {
		from = i + 1
		if i = skipDigits(b, from); i == from {
			return i, errNotJSON
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		from = i
		if i = skipDigits(b, from); i == from {
			return i, errNotJSON
		}
	}
	return i, nil
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		i++
	}
	return i
}

package invalidation

import (
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Bounds on one JSON document that a run, a worker or a report brings: the database must be able to store it, and
// every program that reads it back must be able to hold it.
const (
	documentBytesMax = 64 << 20
	documentDepthMax = 500
	// elements and members; Postgres allocates some 30 bytes for each at once, and 1 GB at most
	documentValuesMax = 4_000_000
	noteBytesMax      = 64 << 10
)

// CheckJSON returns an error that matches ErrInvalid unless text is one JSON value that the database can store and that
// programs can read back: valid UTF-8 without NUL or half of a surrogate pair, of at most 64 MiB and 4,000,000 values,
// nested at most 500 deep, with numbers within the bounds of CheckNumbers.
func CheckJSON(text []byte) error {
	switch {
	case len(text) > documentBytesMax:
		return fmt.Errorf("JSON of %d bytes, more than %d: %w", len(text), documentBytesMax, ErrInvalid)
	case !json.Valid(text):
		return fmt.Errorf("it is not JSON: %w", ErrInvalid)
	case !utf8.Valid(text):
		return fmt.Errorf("it is not UTF-8: %w", ErrInvalid)
	}
	if err := checkShape(text); err != nil {
		return err
	}
	return CheckNumbers(text)
}

// checkShape checks depth, number of values and texts of valid JSON.
func checkShape(text []byte) error {
	depth, values := 0, 1
	for i := 0; i < len(text); {
		switch text[i] {
		case '[', '{':
			if depth++; depth > documentDepthMax {
				return fmt.Errorf("JSON is nested more than %d deep: %w", documentDepthMax, ErrInvalid)
			}
		case ']', '}':
			depth--
		case ',':
			if values++; values > documentValuesMax {
				return fmt.Errorf("JSON has more than %d values: %w", documentValuesMax, ErrInvalid)
			}
		case '"':
			end := stringEnd(text, i)
			if err := checkEscapes(text[i:end]); err != nil {
				return fmt.Errorf("text at byte %d: %w", i, err)
			}
			i = end
			continue
		}
		i++
	}
	return nil
}

// checkEscapes refuses what a JSON string can name and a text of the database cannot hold.
func checkEscapes(quoted []byte) error {
	for i := 0; i < len(quoted); i++ {
		if quoted[i] != '\\' {
			continue
		}
		if i++; quoted[i] != 'u' {
			continue
		}
		unit := escaped(quoted[i+1:])
		i += 4
		switch {
		case unit == 0:
			return fmt.Errorf("it contains NUL: %w", ErrInvalid)
		case !utf16.IsSurrogate(unit):
			continue
		case len(quoted) <= i+6 || quoted[i+1] != '\\' || quoted[i+2] != 'u' ||
			utf16.DecodeRune(unit, escaped(quoted[i+3:])) == utf8.RuneError:
			return fmt.Errorf("it contains half of a surrogate pair: %w", ErrInvalid)
		}
		i += 6
	}
	return nil
}

// escaped is the UTF-16 unit of the four digits that digits begin with.
func escaped(digits []byte) rune {
	unit, err := strconv.ParseUint(string(digits[:4]), 16, 16)
	if err != nil {
		return utf8.RuneError // the parser has accepted them
	}
	return rune(unit)
}

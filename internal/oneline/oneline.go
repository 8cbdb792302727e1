// Package oneline fits text of others, such as the message of a server, into one line.
package oneline

import (
	"strings"
	"unicode"
)

// Of returns text as one line that cannot break a table, steer a terminal, or change the direction in which the rest of
// the line is read, and that Postgres stores: it is valid UTF-8 without NUL. A line break or a tab becomes a blank, any
// other such character U+FFFD.
func Of(text string) string {
	return strings.Map(func(r rune) rune { // which passes an invalid byte as U+FFFD
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case unicode.In(r, unicode.Cc, unicode.Bidi_Control, unicode.Zl, unicode.Zp):
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// Short returns the line of text with single blanks and of at most so many characters, the last of which is an ellipsis
// where some were cut off.
func Short(text string, most int) string {
	line := strings.Join(strings.Fields(Of(text)), " ")
	if runes := []rune(line); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return line
}

// Package duration reads durations as people and other programs write them: in JSON and in the header Retry-After.
package duration

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// longest is the longest duration that is read, 31 years: sums and multiples of it fit into a time.Duration.
const longest = 1e9 * time.Second

// Seconds is a duration that JSON writes as a number of seconds. It reads numbers and Go durations ("90s", "10m").
type Seconds time.Duration

// Duration of s.
func (s Seconds) Duration() time.Duration { return time.Duration(s) }

// Float is the number of seconds, with a fraction where there is one.
func (s Seconds) Float() float64 { return time.Duration(s).Seconds() }

// MarshalJSON writes the number of seconds.
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(s.Float()) }

// UnmarshalJSON reads a number of seconds, or a text in Go's notation.
func (s *Seconds) UnmarshalJSON(data []byte) error {
	if string(data) == "null" { // leaves it as it is
		return nil
	}
	var text string
	if json.Unmarshal(data, &text) == nil {
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("read duration %q: want a number of seconds or 10m30s", text)
		}
		if d.Abs() > longest {
			return fmt.Errorf("read duration %q: want at most %v", text, longest)
		}
		*s = Seconds(d)
		return nil
	}
	var seconds float64
	if err := json.Unmarshal(data, &seconds); err != nil {
		return fmt.Errorf("read duration %s: want a number of seconds or \"10m30s\"", data)
	}
	if math.Abs(seconds) > longest.Seconds() {
		return fmt.Errorf("read duration %s: want at most %v seconds", data, longest.Seconds())
	}
	*s = Seconds(math.Round(seconds * float64(time.Second)))
	return nil
}

// RetryAfter is how long the header Retry-After of an answer asks to wait, but not longer than most; 0 without the
// header. It is a number of seconds, which some servers give with a fraction, or a date (RFC 9110, 10.2.3). A date is
// compared with the Date of the answer, or with now where that is missing, so that the clock of the server does not
// matter.
func RetryAfter(header http.Header, now time.Time, most time.Duration) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if value != "" && strings.Trim(value, "0123456789.") == "" {
		seconds, err := strconv.ParseFloat(value, 64)
		if err != nil && !errors.Is(err, strconv.ErrRange) { // beyond the range it is infinite
			return 0
		}
		return time.Duration(min(seconds, most.Seconds()) * float64(time.Second))
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	if sent, err := http.ParseTime(header.Get("Date")); err == nil {
		now = sent
	}
	return min(max(at.Sub(now), 0), most)
}

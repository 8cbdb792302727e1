package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
)

// Settings of --set become options that JSON can hold, or an error that is the caller's.
func FuzzSettings(f *testing.F) {
	for _, seed := range []string{"capacity=10", `retry={"base": 2}`, "result_retention=1 day", "=", "a", "a==", "a=\x00", "a=1e999"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, pair string) {
		options, err := readSettings([]string{pair})
		if err != nil {
			if options != nil {
				t.Errorf("options %v beside an error", options)
			}
			return
		}
		name, value, _ := strings.Cut(pair, "=")
		if _, there := options[name]; !there || len(options) != 1 {
			t.Errorf("%q became %v", pair, options)
		}
		if json.Valid([]byte(value)) {
			return
		}
		if options[name] != value {
			t.Errorf("the text %q became %v", value, options[name])
		}
	})
}

// Rows of a trace, CSV or JSON, become pushes with a payload, or an error; reading comes to an end.
func FuzzTraceRows(f *testing.F) {
	for _, seed := range []string{
		"at,flow,cost\n2026-01-01T00:00:00Z,a,1\n", "at\n1e300\n", `{"at": 1, "flow": {"x": [1]}}`, `{"at": "2026-01-01 00:00:00"}{`, "\"\n", "a,a\n1,2\n", "{",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		next, err := rows(bufio.NewReader(bytes.NewReader(text)))
		if err != nil {
			return
		}
		from := trace{at: "at", flow: "flow", cost: "cost"}
		for n := 0; ; n++ {
			row, err := next()
			if err != nil {
				return
			}
			if n > len(text) {
				t.Fatal("more rows than bytes")
			}
			push, _, err := from.read(row)
			if err == nil && !json.Valid(push.Payload) {
				t.Errorf("payload %q", push.Payload)
			}
			if errors.Is(err, io.EOF) {
				t.Error("the end of the trace is the error of a row")
			}
		}
	})
}

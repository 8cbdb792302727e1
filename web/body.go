package web

import (
	"bytes"
	"encoding/json"
	"net/url"
	"regexp"

	"github.com/penstock/penstock/web/format"
)

// bodyMax bounds the bytes of a payload or a result on a page. The API has all of it.
const bodyMax = 32 << 10

// body is a payload or a result as a page displays it.
type body struct {
	Text     string
	Bytes    int64
	Cut      bool // only the begin is displayed
	Redacted bool // values are left out, for the visitor's role
}

// secretName matches fields that hold secrets by their names.
var secretName = regexp.MustCompile(`(?i)pass(word|wd)?$|secret|token|authorization|api_?key|credential|private_?key`)

// countName matches those of them that are numbers of tokens, as in usage.prompt_tokens: numbers there are no secrets.
var countName = regexp.MustCompile(`(?i)tokens|token_?(count|limit|id)`)

const redacted = "▒▒▒"

// bodyFor returns a JSON document as a role may see it: administrators all of it, operators without
// the texts and numbers in fields whose names say that they are secret, viewers the fields with the kinds of
// their values. Numbers keep all digits.
func bodyFor(text json.RawMessage, r role) body {
	b := body{Bytes: int64(len(text))}
	if len(text) == 0 {
		return b
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		b.Text = "not readable as JSON"
		return b
	}
	if r < administrator {
		v = redact(v, r, &b.Redacted)
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(v) // it was read as JSON
	b.Text = out.String()
	if len(b.Text) > bodyMax {
		b.Text, b.Cut = string(bytes.ToValidUTF8([]byte(b.Text[:bodyMax]), nil)), true
	}
	return b
}

func redact(v any, r role, did *bool) any {
	switch x := v.(type) {
	case map[string]any:
		for name, value := range x {
			if secretName.MatchString(name) {
				x[name] = redactSecret(value, countName.MatchString(name), did)
				continue
			}
			x[name] = redact(value, r, did)
		}
	case []any:
		for i := range x {
			x[i] = redact(x[i], r, did)
		}
	case string:
		if r < operatorRole {
			*did = true
			return "text of " + format.Count(int64(len([]rune(x)))) + " characters"
		}
	}
	return v
}

// redactSecret leaves out the texts and numbers of a value at any depth. Counts are numbers below a name that counts
// tokens: they stay.
func redactSecret(v any, counts bool, did *bool) any {
	switch x := v.(type) {
	case map[string]any:
		for name, value := range x {
			x[name] = redactSecret(value, counts || countName.MatchString(name), did)
		}
	case []any:
		for i := range x {
			x[i] = redactSecret(x[i], counts, did)
		}
	case json.Number:
		if !counts {
			*did = true
			return redacted
		}
	case string:
		*did = true
		return redacted
	}
	return v
}

// parameters writes pairs of parameter and value for an address, without the empty ones.
func parameters(pairs ...string) string {
	values := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			values.Set(pairs[i], pairs[i+1])
		}
	}
	return values.Encode()
}

func secondsText(s float64) string { return format.Seconds(s) }

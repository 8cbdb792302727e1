package worker

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
)

// ParseCogCallback turns the body that a Cog worker posts to a callback address into an outcome:
// Accepted with new Progress while the run goes on, a final one when it completed. The body must be
// about the entry of the run.
//
// Answer the worker 2xx at once. When the outcome cannot be stored, answer 503:
// Cog repeats a completed callback on 5xx, and gives up on any 4xx.
func ParseCogCallback(run RunRef, body []byte) (Outcome, error) {
	var p prediction
	if err := json.Unmarshal(body, &p); err != nil {
		return Outcome{}, fmt.Errorf("read cog callback: %w", err)
	}
	if p.ID != run.Entry {
		return Outcome{}, fmt.Errorf("read cog callback: it is about prediction %q, not %q", Clip(p.ID), run.Entry)
	}
	if !p.known() {
		return Outcome{}, fmt.Errorf("read cog callback: unknown status %q", Clip(p.Status))
	}
	return p.outcome(run, body).ofAccepted(), nil
}

// CallbackToken returns the unguessable part of a callback address:
// it binds the address to one lock of one entry. A holder of key can check it
// without asking the database.
func CallbackToken(key []byte, entry string, token int64) string {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(strconv.Itoa(len(entry)) + ":" + entry + ":" + strconv.FormatInt(token, 10)))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// CheckCallbackToken compares in constant time.
func CheckCallbackToken(key []byte, entry string, token int64, given string) bool {
	return hmac.Equal([]byte(CallbackToken(key, entry, token)), []byte(given))
}

// ReadReport reads the body that a worker of the model posts about a run.
func (m Model) ReadReport(run RunRef, body []byte) (Outcome, error) {
	if m.Protocol == ProtocolCog {
		return ParseCogCallback(run, body)
	}
	return (&generic{wire{model: m}}).report(run, body)
}

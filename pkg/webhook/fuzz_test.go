package webhook

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/duration"
)

// Nothing that was not signed verifies, whatever the headers are.
func FuzzVerify(f *testing.F) {
	secret := Secret{key: []byte("a secret that fuzzing does not find")}
	key := secret.signingKey()
	now := time.Unix(1_700_000_000, 0)
	f.Add("msg_1", "1700000000", "v1,AAAA v1a,AAAA", []byte("{}"))
	f.Add("", "-1", "v1,", []byte(nil))
	f.Fuzz(func(t *testing.T, id, timestamp, signature string, body []byte) {
		h := http.Header{}
		h.Set(HeaderID, id)
		h.Set(HeaderTimestamp, timestamp)
		h.Set(HeaderSignature, signature)
		if Verify(h, now, body, secret) == nil || VerifyKey(h, now, body, key.Public()) == nil {
			t.Errorf("%q, %q, %q verifies", id, timestamp, signature)
		}
		signed, err := sign(id, now, body, []Secret{secret}, []signingKey{key})
		if err != nil {
			return
		}
		if err := Verify(signed, now, body, secret); err != nil {
			t.Errorf("what was signed as %q: %v", id, err)
		}
		if err := VerifyKey(signed, now, body, key.Public()); err != nil {
			t.Errorf("what was signed as %q: %v", id, err)
		}
	})
}

// A secret or key that is taken is written as it was read.
func FuzzParseSecret(f *testing.F) {
	f.Add(NewSecret().Reveal())
	f.Add(NewSecret().signingKey().Public().String())
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseSecret(text); err == nil && s.Reveal() != text {
			t.Errorf("%q is read as %q", text, s.Reveal())
		}
		if k, err := ParsePublicKey(text); err == nil && k.String() != text {
			t.Errorf("%q is read as %q", text, k)
		}
	})
}

// Whatever a receiver asks for, the wait is bounded and not negative.
func FuzzRetryAfter(f *testing.F) {
	f.Add("120", "")
	f.Add("Wed, 21 Oct 2015 08:00:00 GMT", "Wed, 21 Oct 2015 07:00:00 GMT")
	f.Fuzz(func(t *testing.T, value, date string) {
		if strings.ContainsAny(value+date, "\r\n") {
			return
		}
		h := http.Header{"Retry-After": {value}, "Date": {date}}
		if wait := duration.RetryAfter(h, time.Unix(1_700_000_000, 0), retryAfterMax); wait < 0 || wait > retryAfterMax {
			t.Errorf("%q at %q: %s", value, date, wait)
		}
	})
}

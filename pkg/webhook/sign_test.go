package webhook

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/penstock/penstock/internal/machine"
)

func secretOf(t testing.TB, text string) Secret {
	t.Helper()
	s, err := ParseSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// The vectors were computed with Python's hmac from the specification's text.
func TestSignatureVectors(t *testing.T) {
	s := secretOf(t, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	for _, c := range []struct {
		id        string
		at        int64
		body      string
		signature string
	}{
		{"msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, `{"test": 2432232314}`, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
		{"msg_loFOjxBNrRLzqYUf", 1731705121, `{"event_type":"ping","data":{"success":true}}`, "v1,ra7kgjOCnSSR5URJ70WM3QMv18NGuuwnmtI2W0CEQ1c="},
	} {
		h, err := Sign(c.id, time.Unix(c.at, 0), []byte(c.body), s)
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Get("webhook-signature"); got != c.signature {
			t.Errorf("%s: signature %s, want %s", c.id, got, c.signature)
		}
		if h.Get("webhook-id") != c.id || h.Get("webhook-timestamp") != strconv.FormatInt(c.at, 10) {
			t.Errorf("headers are %v", h)
		}
	}
}

func TestSecretsThatAreRefused(t *testing.T) {
	short := "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 23))
	long := "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 65))
	for _, text := range []string{"", "whsec_", "hunter2hunter2hunter2hunter2", "whsec_hunter2!", short, long, "whsk_" + strings.Repeat("A", 44)} {
		_, err := ParseSecret(text)
		if err == nil {
			t.Errorf("%q was accepted", text)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("error repeats the secret: %v", err)
		}
	}
	for _, size := range []int{24, 64} {
		secretOf(t, "whsec_"+base64.StdEncoding.EncodeToString(make([]byte, size)))
	}
}

func TestSecretDoesNotPrint(t *testing.T) {
	s := NewSecret()
	key := strings.TrimPrefix(s.Reveal(), "whsec_")
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		if text := fmt.Sprintf(format, s); strings.Contains(text, key) {
			t.Errorf("%s shows the secret", format)
		}
	}
	if text, _ := json.Marshal(struct{ S Secret }{s}); strings.Contains(string(text), key) {
		t.Error("JSON shows the secret")
	}
	if again := secretOf(t, s.Reveal()); !bytes.Equal(again.key, s.key) {
		t.Error("a revealed secret does not read back")
	}
}

func TestUnsignableMessages(t *testing.T) {
	s := NewSecret()
	for _, id := range []string{"", "a.b", "a\r\nX: y"} {
		if _, err := Sign(id, time.Now(), nil, s); err == nil {
			t.Errorf("id %q was signed", id)
		}
	}
	for _, secrets := range [][]Secret{nil, {s, s, s}, {{}}} {
		if _, err := Sign("id", time.Now(), nil, secrets...); err == nil {
			t.Errorf("signed with %d secrets", len(secrets))
		}
	}
}

func TestVerifyTrustsOnlyWhatWasSigned(t *testing.T) {
	current, previous, stranger := NewSecret(), NewSecret(), NewSecret()
	now, body := time.Unix(1_700_000_000, 0), []byte(`{"a":1}`)
	h, err := Sign("msg_1", now, body, current, previous)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change  func(http.Header)
		now     time.Time
		body    string
		secrets []Secret
		good    bool
	}{
		"current":                 {nil, now, `{"a":1}`, []Secret{current}, true},
		"previous":                {nil, now, `{"a":1}`, []Secret{previous}, true},
		"four minutes old":        {nil, now.Add(4 * time.Minute), `{"a":1}`, []Secret{current}, true},
		"stranger":                {nil, now, `{"a":1}`, []Secret{stranger}, false},
		"changed body":            {nil, now, `{"a":2}`, []Secret{current}, false},
		"replayed":                {nil, now.Add(301 * time.Second), `{"a":1}`, []Secret{current}, false},
		"from the future":         {nil, now.Add(-301 * time.Second), `{"a":1}`, []Secret{current}, false},
		"other id":                {func(h http.Header) { h.Set(HeaderID, "msg_2") }, now, `{"a":1}`, []Secret{current}, false},
		"other time":              {func(h http.Header) { h.Set(HeaderTimestamp, "1700000001") }, now, `{"a":1}`, []Secret{current}, false},
		"no signature":            {func(h http.Header) { h.Del(HeaderSignature) }, now, `{"a":1}`, []Secret{current}, false},
		"signature of version v2": {func(h http.Header) { h.Set(HeaderSignature, "v2,"+h.Get(HeaderSignature)[3:47]) }, now, `{"a":1}`, []Secret{current}, false},
	} {
		header := h.Clone()
		if c.change != nil {
			c.change(header)
		}
		if err := Verify(header, c.now, []byte(c.body), c.secrets...); (err == nil) != c.good || (err != nil && !errors.Is(err, ErrSignature)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestScheduleGrowsAndJitterOnlyAdds(t *testing.T) {
	want := []time.Duration{0, 5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour}
	for i, w := range want {
		if got, ok := Schedule(i+1, 0); !ok || got != w {
			t.Errorf("attempt %d after %s, want %s", i+1, got, w)
		}
	}
	for _, n := range []int{-1, 0, 11} {
		if _, ok := Schedule(n, 0); ok {
			t.Errorf("there is an attempt %d", n)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		n, jitter := rapid.IntRange(1, 10).Draw(t, "n"), rapid.Float64Range(0, 1).Draw(t, "jitter")
		if got, _ := Schedule(n, jitter); got < want[n-1] || got > want[n-1]+want[n-1]/5 {
			t.Fatalf("attempt %d after %s, base %s", n, got, want[n-1])
		}
	})
}

// The receivers of the world use this library.
func TestUnracedStandardWebhooksLibraryAcceptsOurSignatures(t *testing.T) {
	dir := receiver(t)
	current, previous, stranger := NewSecret(), NewSecret(), NewSecret()
	now := time.Now()
	body, err := newBody(envelope{
		Type: "entry.done", At: now, Issuer: "us", Audience: "https://a.example/in", Data: json.RawMessage(`{"id":17,"text":"größer <&> \u2028"}`),
	})
	if err != nil {
		t.Fatal(err)
	}
	type message struct {
		Secret  string            `json:"secret"`
		Headers map[string]string `json:"headers"`
		Body    string            `json:"body"`
	}
	type toSign struct {
		Secret string `json:"secret"`
		ID     string `json:"id"`
		At     int64  `json:"at"`
		Body   string `json:"body"`
	}
	signed := func(at time.Time, receives Secret, body string, signers ...Secret) message {
		h, err := sign("msg_17", at, []byte(body), signers, []signingKey{signers[0].signingKey()})
		if err != nil {
			t.Fatal(err)
		}
		return message{receives.Reveal(), map[string]string{
			"webhook-id": h.Get(HeaderID), "webhook-timestamp": h.Get(HeaderTimestamp), "webhook-signature": h.Get(HeaderSignature),
		}, body}
	}
	tampered := signed(now, current, string(body), current)
	tampered.Body += " "
	task := struct {
		Verify []message `json:"verify"`
		Sign   []toSign  `json:"sign"`
	}{
		[]message{
			signed(now, current, string(body), current),
			signed(now, current, string(body), current, previous),
			signed(now, previous, string(body), current, previous),
			signed(now.Add(-4*time.Minute), current, string(body), current),
			signed(now, stranger, string(body), current, previous),
			signed(now.Add(-10*time.Minute), current, string(body), current),
			tampered,
		},
		[]toSign{{current.Reveal(), "msg_18", now.Unix(), string(body)}},
	}
	accepted := []bool{true, true, true, true, false, false, false}
	input, err := json.Marshal(task)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "node", filepath.Join(dir, "receive.mjs"))
	cmd.Stdin, cmd.Stderr = bytes.NewReader(input), os.Stderr
	output, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Verified []*string `json:"verified"`
		Signed   []string  `json:"signed"`
	}
	if err := json.Unmarshal(output, &got); err != nil || len(got.Verified) != len(accepted) || len(got.Signed) != 1 {
		t.Fatalf("receiver answered %s: %v", output, err)
	}
	for i, problem := range got.Verified {
		if (problem == nil) != accepted[i] {
			t.Errorf("message %d: accepted is %t, want %t", i, problem == nil, accepted[i])
		}
	}
	h, err := Sign("msg_18", now, body, current)
	if err != nil || h.Get(HeaderSignature) != got.Signed[0] {
		t.Errorf("we sign %s, the library %s", h.Get(HeaderSignature), got.Signed[0])
	}
}

// receiver installs the library beside the script, in a directory of the test.
func receiver(t *testing.T) string {
	t.Helper()
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			machine.Lacks(t, "npm", tool+" is not installed")
		}
	}
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json", "receive.mjs"} {
		text, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	cmd.Dir = dir
	if output, err := cmd.CombinedOutput(); err != nil {
		machine.Lacks(t, "npm", fmt.Sprintf("standardwebhooks cannot be installed: %v\n%s", err, output))
	}
	return dir
}

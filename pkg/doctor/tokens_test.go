package doctor

import (
	"fmt"
	"strings"
	"testing"
)

func TestTokensThatEndAreNamed(t *testing.T) {
	pool := newPool(t)
	n := 0
	token := func(name, madeBefore, endsIn string) {
		t.Helper()
		n++
		exec(t, pool, `
INSERT INTO penstock.api_token (name, hash, scopes, created_at, created_by, expires_at)
VALUES ($1, sha256($2::text::bytea), '{push,read}', now() - $3::interval, 'ada', now() + $4::interval)`,
			name, fmt.Sprint(n), madeBefore, endsIn)
	}
	token("year", "300 days", "65 days")
	exec(t, pool, `INSERT INTO penstock.api_token (name, hash, scopes, created_by) VALUES ('endless', sha256('x'), '{read}', 'ada')`)
	token("old", "400 days", "-8 days")
	token("day", "1 hour", "23 hours")         // made for a day, and young
	token("night", "3 days", "-2 days")        // made for a day, and ended for longer than that
	token("rotated", "350 days", "30 minutes") // its overlap
	token("rotated", "10 minutes", "364 days") // its successor
	token("again", "365 days", "-2 days")      // ended, and made again
	token("again", "1 day", "364 days")        // the one that holds
	token("revoked", "360 days", "5 days")     // of no use
	exec(t, pool, `UPDATE penstock.api_token SET revoked_at = now() WHERE name = 'revoked'`)
	want(t, find(t, pool, "tokens", Config{}), Fine, "no token of the API ends soon")

	token("ci", "346 days", "19 days")
	token("producer", "367 days", "-2 days")
	token("hours", "20 hours", "4 hours")
	f := find(t, pool, "tokens", Config{})
	want(t, f, Warning, "ended: 3", "token ci (push, read) ends in 18 d 23 h, on 20", "token producer (push, read) ended 2 d 0 h ago, on 20",
		"token hours (push, read) ends in 3 h 59 m", "penstock token rotate NAME", "penstock token create NAME")
	if len(f.Details) != 3 || !strings.HasPrefix(f.Details[0], "token producer") {
		t.Errorf("the first of three that end is %q", f.Details)
	}
}

// The summary counts all lines, and the details are the first of them.
func TestMoreThanTheDetailsAreCounted(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `
INSERT INTO penstock.api_token (name, hash, scopes, created_at, created_by, expires_at)
SELECT 'token-' || n, sha256(n::text::bytea), '{read}', now() - interval '1 year', 'ada', now() + interval '1 day'
  FROM generate_series(1, $1) n`, linesMax+7)
	f := find(t, pool, "tokens", Config{})
	want(t, f, Warning, fmt.Sprintf("ended: %d", linesMax+7))
	if len(f.Details) != linesMax {
		t.Errorf("%d details, want %d", len(f.Details), linesMax)
	}
}

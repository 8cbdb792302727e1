package gateway

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// A budget counts what the calls of the token's flows, and of flows below them, have taken in its period.
func TestTheBudgetOfATokenCountsFlowsBelowItsOwn(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for _, sql := range []string{
		`SELECT penstock.create_queue('work')`,
		`INSERT INTO penstock.api_token (name, hash, scopes, flows, gpu_ms, gpu_period, created_by)
		 VALUES ('acme', sha256('a'), '{call}', '{acme}', 1000, 'day', 'ann'), ('free', sha256('b'), '{call}', '{}', NULL, NULL, 'ann')`,
		`INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
		 SELECT date_trunc('day', now(), 'UTC') - v.ago, q.id, 'm', v.flow, 1, v.ms, 0, 0, 0, 0
		   FROM penstock.queue q, (VALUES ('acme', 700, interval '0'), ('acme/nightly', 400, '0'), ('acme2', 9000, '0'), ('acme', 9000, '1 hour')) v(flow, ms, ago)
		  WHERE q.name = 'work'`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	s, wrong, err := ReadSettings(t.Context(), pool, Settings{})
	if err != nil || len(wrong) > 0 {
		t.Fatal(err, wrong)
	}
	budgets, err := ReadBudgets(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	s.SetBudgets(budgets)
	of := map[string]Budget{}
	for _, token := range s.Tokens {
		of[token.Name] = token.Budget
	}
	if b := of["acme"]; b.MS != 1000 || b.Spent != 1100 || b.Period != "day" || b.Ends.IsZero() {
		t.Errorf("budget of acme is %+v, want 1100 of 1000 of a day", b)
	}
	if b := of["free"]; b != (Budget{}) {
		t.Errorf("budget of a token without one is %+v", b)
	}
}

// Tokens of other scopes, such as those of dashboards, call no model.
func TestOnlyTokensOfScopesCallAndAdminAreRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO penstock.api_token (name, hash, scopes, created_by)
		SELECT s, sha256(s::bytea), ARRAY[s], 'ann' FROM unnest('{push,read,operate,announce,call,admin}'::text[]) s`)
	if err != nil {
		t.Fatal(err)
	}
	s, wrong, err := ReadSettings(t.Context(), pool, Settings{})
	if err != nil || len(wrong) > 0 {
		t.Fatal(err, wrong)
	}
	var names []string
	for _, token := range s.Tokens {
		names = append(names, token.Name)
	}
	if slices.Sort(names); !slices.Equal(names, []string{"admin", "call"}) {
		t.Errorf("tokens %v may call models, want admin and call", names)
	}
}

// While the use of GPU time cannot be summed, tokens are read, and their budgets stay.
func TestSettingsDoNotWaitForBudgets(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO penstock.api_token (name, hash, scopes, flows, gpu_ms, gpu_period, created_by)
		VALUES ('acme', sha256('a'), '{call}', '{acme}', 1000, 'day', 'ann'), ('gone', sha256('b'), '{call}', '{gone}', 1000, 'day', 'ann')`)
	if err != nil {
		t.Fatal(err)
	}
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := holder.Exec(t.Context(), `LOCK TABLE penstock.usage_hour`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE penstock.api_token SET revoked_at = now() WHERE name = 'gone'`); err != nil {
		t.Fatal(err)
	}
	before := Budget{MS: 1000, Spent: 1000, Period: "day", Ends: time.Now().Add(time.Hour)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // what waits for the lock waits without end
	defer cancel()
	s, _, err := ReadSettings(ctx, pool, Settings{Budgets: map[string]Budget{"acme": before}})
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Tokens) != 1 || s.Tokens[0].Name != "acme" || s.Tokens[0].Budget != before {
		t.Errorf("tokens are %+v, want acme alone with the budget before", s.Tokens)
	}
}

// Pauses of a queue, a model, an application and a flow hold online until their end, whether a leader has removed them
// by then or not.
func TestAPauseWithAnEndEndsOnline(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	for name, c := range map[string]struct{ pause, end string }{
		"queue": {
			`SELECT penstock.pause_queue(q.name, 'maintenance', 'ops', now() + interval '1 day') FROM penstock.queue q WHERE q.model = 'm'`,
			`UPDATE penstock.queue SET paused_until = now() - interval '1 second' WHERE model = 'm'`,
		},
		"model":       {`SELECT penstock.pause('model', 'm', NULL, 'maintenance', 'ops', now() + interval '1 day')`, endPauses},
		"application": {`SELECT penstock.pause('application', 'default', NULL, 'maintenance', 'ops', now() + interval '1 day')`, endPauses},
		"flow":        {`SELECT penstock.pause('flow', 'f', NULL, 'maintenance', 'ops', now() + interval '1 day')`, endPauses},
	} {
		read := func() (n int) {
			s, _, err := ReadSettings(t.Context(), x.pool, Settings{})
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range s.Flows {
				if f.Paused.Reason == "maintenance" && f.Paused.holds(time.Now()) && !f.Paused.Until.IsZero() {
					n++
				}
			}
			for _, p := range s.Paused {
				if p.Reason == "maintenance" && p.holds(time.Now()) && !p.Until.IsZero() {
					n++
				}
			}
			return n
		}
		x.exec(c.pause)
		if read() != 1 {
			t.Errorf("%s: the pause does not hold", name)
		}
		x.exec(c.end)
		if read() != 0 {
			t.Errorf("%s: the pause holds behind its end", name)
		}
	}
}

const endPauses = `UPDATE penstock.pause SET until = now() - interval '1 second'`

// A probe has one time however often it is read, so that a pool counts it once.
func TestAProbeHasOneTime(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	read := func(old Settings) Settings {
		s, _, err := ReadSettings(t.Context(), x.pool, old)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	x.exec(`UPDATE penstock.instance SET checked_at = clock_timestamp() - interval '1 second', queued = 1`)
	first := read(Settings{})
	again := read(read(first))
	if at := again.Readings[x.instance].At; at.IsZero() || !at.Equal(first.Readings[x.instance].At) {
		t.Errorf("the same probe is of %s and of %s", first.Readings[x.instance].At, at)
	}
	x.exec(`UPDATE penstock.instance SET checked_at = clock_timestamp()`)
	if at := read(again).Readings[x.instance].At; !at.After(first.Readings[x.instance].At) {
		t.Errorf("the next probe is of %s, not behind %s", at, first.Readings[x.instance].At)
	}
}

// Names below a flow have its criticality, weight and pause, as far as they have none of their own.
func TestNamesBelowAFlowHaveItsSettings(t *testing.T) {
	t.Parallel()
	g := New(Config{})
	g.SetFlows(map[string]FlowState{
		"shop":          {Criticality: Sheddable, Set: true, Weight: 0.1},
		"shop/checkout": {Criticality: Critical, Set: true},
		"batch":         {Paused: PauseState{Reason: "maintenance"}},
		"batch/urgent":  {Weight: 3},
	})
	for name, want := range map[string]FlowState{
		"shop":            {Criticality: Sheddable, Set: true, Weight: 0.1},
		"shop/x":          {Criticality: Sheddable, Set: true, Weight: 0.1},
		"shop/x/y":        {Criticality: Sheddable, Set: true, Weight: 0.1},
		"shop/checkout":   {Criticality: Critical, Set: true, Weight: 0.1},
		"shop/checkout/a": {Criticality: Critical, Set: true, Weight: 0.1},
		"batch/urgent":    {Weight: 3, Paused: PauseState{Reason: "maintenance"}},
		"shopping":        {},
		"":                {},
	} {
		if got := g.flow(name); got != want {
			t.Errorf("%q: got %+v, want %+v", name, got, want)
		}
	}
}

// A pause ends by the clock where no settings can be read, as from a snapshot while the database is away.
func TestAPauseEndsByTheClock(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for name, c := range map[string]struct {
		until time.Time
		model int // status of the request
	}{
		"without an end": {time.Time{}, 503},
		"not over":       {now.Add(time.Hour), 503},
		"over":           {now.Add(-time.Second), 200},
	} {
		for _, of := range []string{"model", "flow", "name above"} {
			path := filepath.Join(t.TempDir(), "snapshot")
			paused := PauseState{Reason: "maintenance", Until: c.until}
			saved := SavedState{At: now, Settings: Settings{Flows: map[string]FlowState{}}}
			switch of {
			case "model":
				saved.Models = []ModelState{{Paused: paused}}
			case "flow":
				saved.Settings.Flows["shop"] = FlowState{Paused: paused}
			default:
				saved.Settings.Flows["shop"] = FlowState{Paused: paused}
				saved.Settings.Flows["shop/x"] = FlowState{Paused: PauseState{Reason: "over long ago", Until: now.Add(-time.Hour)}}
			}
			if err := saved.Write(path); err != nil {
				t.Fatal(err)
			}
			read, err := ReadSavedState(path, now)
			if err != nil {
				t.Fatal(err)
			}
			p := startTestbed(t, func(_ *Config, m *ModelState) {
				if len(read.Models) > 0 {
					m.Paused = read.Models[0].Paused
				}
			}, streamer("{}"))
			p.gateway.SetFlows(read.Settings.Flows)
			if a := p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "shop/x"); a.StatusCode != c.model {
				t.Errorf("a pause of a %s that is %s: got %d %s, want %d", of, name, a.StatusCode, a.body, c.model)
			}
		}
	}
}

// A snapshot of another version is not used: a field that it does not have would say that a model is not asynchronous.
func TestSnapshotOfAnotherVersionIsRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "snapshot")
	now := time.Now()
	for _, text := range []string{
		fmt.Sprintf(`{"at":%q,"models":[{"Name":"m"}]}`, now.Format(time.RFC3339)),
		fmt.Sprintf(`{"version":%d,"at":%q,"models":"of another type"}`, savedVersion+1, now.Format(time.RFC3339)),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := ReadSavedState(path, now); err == nil || !strings.Contains(err.Error(), "another version") {
			t.Errorf("%s: got %d models, error %v", text, len(s.Models), err)
		}
	}
}

// How old a snapshot is cannot be known where the clock of the machine was set back since it was written.
func TestASnapshotOfATimeToComeIsRefused(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "snapshot")
	now := time.Now()
	for ahead, fine := range map[time.Duration]bool{
		-StateKept - time.Second: false, -time.Minute: true, 30 * time.Second: true, 30 * time.Minute: false,
	} {
		if err := (SavedState{At: now.Add(ahead)}).Write(path); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadSavedState(path, now); (err == nil) != fine {
			t.Errorf("a snapshot that was written %v from now: %v", ahead, err)
		}
	}
}

// The version of the snapshot is that of its fields.
func TestSnapshotHasAVersionForItsFields(t *testing.T) {
	t.Parallel()
	const version, fields = 9, "89d17558f41dc001"
	hash := fnv.New64a()
	writeFields(hash, reflect.TypeFor[SavedState]())
	if got := fmt.Sprintf("%x", hash.Sum64()); got != fields || savedVersion != version {
		t.Errorf("the fields of snapshots are %s, version %d; they were %s in version %d: a change of them needs another version",
			got, savedVersion, fields, version)
	}
}

// writeFields writes the keys and types of all that a snapshot may have. Neither the package of a type nor the name of a
// field that has a key of its own is part of it.
func writeFields(w io.Writer, t reflect.Type) {
	_, _ = fmt.Fprint(w, cmp.Or(t.Name(), t.Kind().String()), ";")
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		writeFields(w, t.Elem())
	case reflect.Map:
		writeFields(w, t.Key())
		writeFields(w, t.Elem())
	case reflect.Struct:
		for i := range t.NumField() {
			if f := t.Field(i); f.IsExported() && f.Tag.Get("json") != "-" {
				_, _ = fmt.Fprint(w, cmp.Or(f.Tag.Get("json"), f.Name), ":")
				writeFields(w, f.Type)
			}
		}
	default:
	}
}

// A token ends after the time that the database gives it, whatever the clock of this machine does.
func TestTheEndOfATokenIsOnTheMonotonicClock(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by, expires_at)
	        SELECT n, sha256(n::bytea), '{call}', 'ann', e FROM (VALUES ('hour', clock_timestamp() + interval '1 hour'),
	               ('years', clock_timestamp() + interval '500 years'), ('ever', NULL)) v(n, e)`)
	began := time.Now()
	s, _, err := ReadSettings(t.Context(), x.pool, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	ends := map[string]time.Time{}
	for _, token := range s.Tokens {
		ends[token.Name] = token.ExpiresAt
	}
	if left := ends["hour"].Sub(began); left < 59*time.Minute || left > time.Hour+time.Minute || !strings.Contains(ends["hour"].String(), "m=+") {
		t.Errorf("a token of an hour ends in %v, at %v", left, ends["hour"])
	}
	if !ends["ever"].IsZero() || ends["years"].Sub(began) < endKnown-time.Minute {
		t.Errorf("tokens without an end, and of centuries, end at %v and %v", ends["ever"], ends["years"])
	}
}

// Nobody has a criticality above default that no operator gave. What is not given of a token's limits stays.
func TestATokenWithoutSettingsIsOfTheCriticalityDefault(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO penstock.api_token (name, hash, scopes, flows, created_by)
	      SELECT s, sha256(s::bytea), '{call}', '{acme}', 'ann' FROM unnest('{plain,limited,kept,given-back,lower}'::text[]) s`)
	exec(`SELECT penstock.set_flow_criticality('acme/urgent', 'critical')`)
	exec(`SELECT penstock.set_gateway_token('limited', rate => 5)`)
	exec(`SELECT penstock.set_gateway_token('kept', '{m}', 'critical', 5, 6, 7)`)
	exec(`SELECT penstock.set_gateway_token('kept', rate => 50)`)
	exec(`SELECT penstock.set_gateway_token('given-back', criticality => 'sheddable')`)
	exec(`SELECT penstock.set_gateway_token('given-back', criticality => '')`)
	exec(`SELECT penstock.set_gateway_token('lower', criticality => 'sheddable')`)
	exec(`SELECT penstock.set_gateway_token('lower', in_flight => 4)`)
	s, wrong, err := ReadSettings(t.Context(), pool, Settings{})
	if err != nil || len(wrong) > 0 {
		t.Fatal(err, wrong)
	}
	g := New(Config{})
	g.SetTokens(s.Tokens)
	g.SetFlows(s.Flows)
	for _, c := range []struct {
		token, flow string
		want        Criticality
	}{
		{"given-back", "acme", Default},
		{"given-back", "acme/urgent", Critical},
		{"lower", "acme/urgent", Sheddable},
		{"plain", "acme", Default},
		{"plain", "acme/urgent", Critical},
		{"limited", "acme", Default},
		{"limited", "acme/urgent", Critical},
		{"kept", "acme", Critical},
		{"kept", "acme/urgent", Critical},
	} {
		by := g.tokens.find(c.token, time.Now())
		if criticality, err := (&serving{caller: by}).criticality("critical", g.flow(c.flow)); criticality != c.want || err != nil {
			t.Errorf("%s asks for critical in %s and gets %s, want %s: %v", c.token, c.flow, criticality, c.want, err)
		}
	}
	kept := g.tokens.find("kept", time.Now())
	if kept.Rate != 50 || kept.InFlightMax != 6 || kept.WaitingMax != 7 || !slices.Equal(kept.Models, []string{"m"}) {
		t.Errorf("another rate left %+v", kept.TokenState)
	}
	exec(`SELECT penstock.set_gateway_token('kept', models => '{}', criticality => 'default', rate => 0, in_flight => 0, waiting => 0)`)
	var cleared bool
	if err := pool.QueryRow(t.Context(), `SELECT (models, criticality, rate, in_flight, waiting) = ('{}', 'default', 0, 0, 0)
	     FROM penstock.gateway_token WHERE name = 'kept'`).Scan(&cleared); err != nil || !cleared {
		t.Errorf("the limits are not removed: %v", err)
	}
}

// A number of one deployment, or of one token, that cannot be read as the others is borne: tokens are read all the same,
// and a snapshot is written. Where they are set they are refused.
func TestNumbersOfOneRowKeepNoSettingsFromBeingRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec := func(sql string, args ...any) error {
		_, err := pool.Exec(t.Context(), sql, args...)
		return err
	}
	for i, policy := range []string{`{"max": 10.0}`, `{"max": 2.5}`, `{"max": 4000000000}`, `{"max": 1e-400}`, `{"max": "unlimited"}`, `{"max": -3}`} {
		model := fmt.Sprint("m", i)
		if err := exec(`SELECT penstock.register_model($1, '{"protocol": "openai"}'), penstock.set_deployment($1, $1)`, model); err != nil {
			t.Fatal(err)
		}
		if err := exec(`UPDATE penstock.deployment SET policy = $2::text::jsonb WHERE name = $1`, model, policy); err != nil {
			t.Fatal(err)
		}
	}
	for _, rate := range []string{"Infinity", "NaN"} {
		err := exec(`SELECT penstock.set_gateway_token('odd', rate => $1::text::real)`, rate)
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "rate of token") {
			t.Errorf("a rate of %s: %v, want it refused", rate, err)
		}
		if err := exec(`INSERT INTO penstock.gateway_token (name, rate) VALUES ($1, $1::text::real)`, rate); err != nil {
			t.Fatal(err)
		}
		if err := exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by) VALUES ($1, sha256($1::text::bytea), '{call}', 'ann')`, rate); err != nil {
			t.Fatal(err)
		}
	}
	s, wrong, err := ReadSettings(t.Context(), pool, Settings{})
	if err != nil || len(wrong) > 0 {
		t.Fatal(err, wrong)
	}
	if len(s.Tokens) != 2 || len(s.Starts) != 5 || s.Starts["m5"].May {
		t.Errorf("%d tokens and the starts %v, want 2 and those of all models but the one with a negative max", len(s.Tokens), s.Starts)
	}
	if err := (SavedState{At: time.Now(), Settings: s}).Write(filepath.Join(t.TempDir(), "snapshot")); err != nil {
		t.Error(err)
	}
}

package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// fixture is a database, a receiver on the loopback, and the webhook queue between them.
type fixture struct {
	*testing.T
	ctx      context.Context
	pool     *pgxpool.Pool
	handler  *Handler
	queue    *invalidation.Queue
	receiver *httptest.Server
	claims   int32

	mu     sync.Mutex
	status []int // answers to come; 200 when there are no more
	header http.Header
	body   []byte
	ids    []string
}

var atHome = AddressPolicy{AllowNetworks: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}

var home = NewVault("a key for tests alone", nil)

func newFixture(t *testing.T, policy AddressPolicy, status ...int) *fixture {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t), MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	d := &fixture{T: t, ctx: t.Context(), pool: pool, status: status, handler: NewHandler(Config{Policy: policy, Vault: home}, pool, nil)}
	if d.queue, err = invalidation.Open(d.ctx, pool, "webhook"); err != nil {
		t.Fatal(err)
	}
	d.receiver = httptest.NewServer(http.HandlerFunc(d.receive))
	t.Cleanup(d.receiver.Close)
	return d
}

func (d *fixture) receive(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.header = r.Header.Clone()
	d.body, _ = io.ReadAll(r.Body)
	d.ids = append(d.ids, r.Header.Get(HeaderID))
	if len(d.status) > 0 {
		w.WriteHeader(d.status[0])
		d.status = d.status[1:]
	}
}

func (d *fixture) must(err error) {
	d.Helper()
	if err != nil {
		d.Fatal(err)
	}
}

// finishWork ends an entry of another queue that wants to be called back.
func (d *fixture) finishWork(url string) {
	d.Helper()
	q, err := invalidation.Create(d.ctx, d.pool, "work", invalidation.Config{})
	d.must(err)
	_, err = q.Push(d.ctx, invalidation.Push{
		Payload:  json.RawMessage(`{}`),
		Callback: json.RawMessage(`{"url": "` + url + `", "context": {"order": 7}}`),
	})
	d.must(err)
	lock := d.claim(q, "")
	ending := invalidation.Done(lock, lock.Entries[0].ID, json.RawMessage(`{"faces": 2}`), time.Second)
	ending.Last = true
	_, err = q.Settle(d.ctx, 1, []invalidation.Ending{ending})
	d.must(err)
}

func (d *fixture) claim(q *invalidation.Queue, flow string) *invalidation.Lock {
	d.Helper()
	d.claims++
	c, err := q.Claim(d.ctx, invalidation.ClaimRequest{
		Node: 1, ClaimID: d.claims, Lane: invalidation.Lane{Priority: 1, Flow: flow}, Limit: 1, IgnoreRowLocks: true,
	})
	d.must(err)
	if len(c.Locks) != 1 {
		d.Fatalf("claimed %d entries of queue %s in flow %q", len(c.Locks), q.Name, flow)
	}
	return c.Locks[0]
}

// deliver runs the callback that waits, and settles it as a node would.
func (d *fixture) deliver() error {
	d.Helper()
	_, err := d.pool.Exec(d.ctx, `UPDATE penstock.entry_webhook SET due_at = now() WHERE status = 'initial'`)
	d.must(err)
	_, err = d.pool.Exec(d.ctx, `UPDATE penstock.ready SET not_before = NULL`)
	d.must(err)
	_, err = d.queue.Promote(d.ctx, 10)
	d.must(err)
	lock := d.claim(d.queue, strings.TrimPrefix(d.receiver.URL, "http://"))
	run := &invalidation.Run{Queue: d.queue, Entry: lock.Entries[0], Lock: lock, Node: 1}
	result, err := d.handler.Handle(d.ctx, run)
	ending := invalidation.Judge(run, result, err, time.Millisecond, 0)
	ending.Last = true
	_, settled := d.queue.Settle(d.ctx, 1, []invalidation.Ending{ending})
	d.must(settled)
	return err
}

func (d *fixture) count(sql string) (n int) {
	d.Helper()
	d.must(d.pool.QueryRow(d.ctx, sql).Scan(&n))
	return n
}

func TestOutcomeOfAnEntryReachesItsReceiverSigned(t *testing.T) {
	d := newFixture(t, atHome)
	d.finishWork(d.receiver.URL + "/done")
	d.must(d.deliver())
	var said struct {
		Type string `json:"type"`
		Data struct {
			Queue, Outcome string
			Result         map[string]int
			Context        map[string]int
		} `json:"data"`
	}
	d.must(json.Unmarshal(d.body, &said))
	if said.Type != "entry.done" || said.Data.Queue != "work" || said.Data.Result["faces"] != 2 || said.Data.Context["order"] != 7 {
		t.Errorf("receiver was told %s", d.body)
	}
	e, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL+"/done")
	d.must(err)
	d.must(Verify(d.header, time.Now(), d.body, e.Secrets...))
	if n := d.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n != 2 {
		t.Errorf("%d entries are done, want the work and its callback", n)
	}
}

func TestEachAttemptIsOneRunUnderTheSameID(t *testing.T) {
	d := newFixture(t, atHome, 500, 503, 200)
	d.finishWork(d.receiver.URL)
	if err := d.deliver(); err == nil {
		t.Fatal("an answer of 500 was taken as delivered")
	}
	if n := d.count(`SELECT count(*) FROM penstock.entry_webhook WHERE status = 'initial' AND attempt = 1
	                 AND due_at - (history->0->>'at')::timestamptz BETWEEN interval '3 seconds' AND interval '7 seconds'`); n != 1 {
		t.Error("the second attempt is not planned for 5 s from now")
	}
	_ = d.deliver()
	d.must(d.deliver())
	if len(d.ids) != 3 || d.ids[0] != d.ids[1] || d.ids[1] != d.ids[2] {
		t.Errorf("attempts went under the ids %v", d.ids)
	}
}

// Claims walk over what is delayed in line: behind a receiver that is down there is nothing to walk over.
func TestMessagesToAReceiverThatIsDownAreNotInLine(t *testing.T) {
	d := newFixture(t, atHome, http.StatusInternalServerError)
	d.finishWork(d.receiver.URL)
	run := &invalidation.Run{Queue: d.queue}
	for _, c := range []struct {
		wait   time.Duration
		inLine bool
	}{{50 * time.Millisecond, true}, {fullWait + fullWait/5, true}, {time.Minute, false}} {
		lock := d.claim(d.queue, strings.TrimPrefix(d.receiver.URL, "http://"))
		run.Entry, run.Lock = lock.Entries[0], lock
		_, err := d.handler.judge(d.ctx, d.receiver.URL, deliveryOutcome{Kind: deferred, Wait: c.wait, Reason: "it is down"})
		ending := invalidation.Judge(run, nil, err, time.Millisecond, 0)
		ending.Last = true
		_, err = d.queue.Settle(d.ctx, 1, []invalidation.Ending{ending})
		d.must(err)
		if found := d.count(`SELECT count(*) FROM penstock.ready`) > 0; found != c.inLine {
			t.Errorf("deferred for %v: in line is %v, want %v", c.wait, found, c.inLine)
		}
		if n := d.count(`SELECT count(*) FROM penstock.entry_webhook WHERE attempt = 0`); n != 1 {
			t.Errorf("deferred for %v: %d entries without an attempt are left, want 1", c.wait, n)
		}
		_, err = d.pool.Exec(d.ctx, `UPDATE penstock.ready SET not_before = NULL`)
		d.must(err)
	}
}

func TestGoneDisablesTheEndpointUntilItIsRegisteredAgain(t *testing.T) {
	d := newFixture(t, atHome, 410)
	d.finishWork(d.receiver.URL)
	_ = d.deliver()
	if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'disabled'`); n != 1 {
		t.Fatal("the callback is not a failure")
	}
	_, err := d.pool.Exec(d.ctx, `SELECT penstock.push_many('webhook', ARRAY[payload], flows => ARRAY[flow], inside => true) FROM penstock.failure`)
	d.must(err)
	_ = d.deliver()
	if len(d.ids) != 1 {
		t.Fatal("a disabled endpoint was called")
	}
	_, err = Register(d.ctx, d.pool, home, atHome, d.receiver.URL, invalidation.By{Actor: "test", Reason: "a test"})
	d.must(err)
	_, err = d.pool.Exec(d.ctx, `SELECT penstock.push_many('webhook', ARRAY[payload], flows => ARRAY[flow], inside => true) FROM penstock.failure LIMIT 1`)
	d.must(err)
	d.must(d.deliver())
}

// Whoever may push names addresses, and a receiver of his own answers 410 to all of them.
func TestGoneReceiversFillNeitherTheAuditNorTheTable(t *testing.T) {
	d := newFixture(t, atHome, 410)
	d.finishWork(d.receiver.URL + "/in?token=1")
	_ = d.deliver()
	if n := d.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'disable_webhook'`); n != 0 {
		t.Errorf("%d lines of the audit come from a receiver", n)
	}
	for query, gone := range map[string]bool{"?token=1": true, "?token=2": false, "": false} {
		if e, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL+"/in"+query); err != nil || e.Disabled != gone {
			t.Errorf("after 410 to ?token=1, %q is disabled: %t (%v)", query, e.Disabled, err)
		}
	}
	if n := d.count(`SELECT count(*) FROM penstock.webhook_endpoint WHERE url LIKE '%token%'`); n != 0 {
		t.Error("the query, which may hold a capability, is kept")
	}
	_, err := d.pool.Exec(d.ctx, `INSERT INTO penstock.webhook_endpoint (url, disabled_at, disabled_reason)
	    SELECT 'https://x.example/' || n, now(), $1 FROM generate_series(1, $2) n`, goneReason, goneMax)
	d.must(err)
	before := d.count(`SELECT count(*) FROM penstock.webhook_endpoint`)
	d.must(markGone(d.ctx, d.pool, "https://y.example/1"))
	if n := d.count(`SELECT count(*) FROM penstock.webhook_endpoint`); n != before {
		t.Errorf("%d rows after another receiver was gone, want %d", n, before)
	}
	// One that somebody registered is disabled however many there are.
	_, err = Register(d.ctx, d.pool, home, AddressPolicy{}, "https://z.example/in", invalidation.By{Actor: "test", Reason: "a test"})
	d.must(err)
	d.must(markGone(d.ctx, d.pool, "https://z.example/in"))
	if e, err := FindEndpoint(d.ctx, d.pool, home, "https://z.example/in"); err != nil || !e.Disabled {
		t.Errorf("a registered receiver that is gone is disabled: %t, %v", e.Disabled, err)
	}
}

// A receiver that an operator has disabled stays disabled: another address of it, with a query, does not enable it.
func TestARegistrationWithAQueryDoesNotUndoAnOperatorsDisable(t *testing.T) {
	d := newFixture(t, atHome)
	by := invalidation.By{Actor: "ada", Reason: "leaks"}
	const bare, asked = "https://acme.example/in", "https://acme.example/in?tenant=7"
	d.must(DisableEndpoint(d.ctx, d.pool, bare, by))
	d.must(markGone(d.ctx, d.pool, asked)) // which changes nothing of it
	_, err := Register(d.ctx, d.pool, home, AddressPolicy{}, asked, invalidation.By{Actor: "bob", Reason: "new tenant"})
	if !errors.Is(err, invalidation.ErrState) || !strings.Contains(err.Error(), bare+" is disabled (leaks)") {
		t.Errorf("registered beside its disabled receiver: %v", err)
	}
	for _, address := range []string{bare, asked} {
		if e, err := FindEndpoint(d.ctx, d.pool, home, address); err != nil || !e.Disabled || e.Reason != "leaks" {
			t.Errorf("%s: %+v, %v, want it disabled", address, e, err)
		}
	}
	if n := d.count(`SELECT count(*) FROM penstock.audit WHERE verb = 'register_webhook'`); n != 0 {
		t.Errorf("%d lines of the audit say that it was registered", n)
	}
	if _, err := Register(d.ctx, d.pool, home, AddressPolicy{}, bare, by); err != nil {
		t.Fatal(err)
	}
	if _, err := Register(d.ctx, d.pool, home, AddressPolicy{}, asked, by); err != nil {
		t.Fatal(err)
	}
	if e, err := FindEndpoint(d.ctx, d.pool, home, asked); err != nil || e.Disabled {
		t.Errorf("after the operator has enabled it: %+v, %v", e, err)
	}
	// One that is gone at its own wish is enabled with the address that is registered, and the audit names both.
	d.must(markGone(d.ctx, d.pool, bare))
	if _, err := Register(d.ctx, d.pool, home, AddressPolicy{}, asked, by); err != nil {
		t.Fatal(err)
	}
	var enabled []string
	d.must(d.pool.QueryRow(d.ctx, `SELECT ARRAY(SELECT jsonb_array_elements_text(detail->'enabled')) FROM penstock.audit ORDER BY id DESC LIMIT 1`).Scan(&enabled))
	if !slices.Equal(enabled, []string{bare}) {
		t.Errorf("the audit names %v as enabled, want %s", enabled, bare)
	}
}

// An address is one receiver however it is written: case of the host, its dot at the end, and the scheme's own port.
func TestAReceiverIsKnownByItsAddressHoweverItIsWritten(t *testing.T) {
	d := newFixture(t, atHome)
	by := invalidation.By{Actor: "test", Reason: "a test"}
	disabled := func(address string) bool {
		e, err := FindEndpoint(d.ctx, d.pool, home, address)
		d.must(err)
		return e.Disabled
	}
	for _, address := range []string{
		"https://acme.example/in?token=1", "https://ACME.example/hook", "https://acme.example:443/other", "https://acme.example./dot",
	} {
		d.must(markGone(d.ctx, d.pool, address))
		if !disabled(address) {
			t.Errorf("%s has answered 410 and is not disabled", address)
		}
		secret, err := Register(d.ctx, d.pool, home, AddressPolicy{}, address, by)
		d.must(err)
		e, err := FindEndpoint(d.ctx, d.pool, home, address)
		d.must(err)
		if e.Disabled || len(e.Secrets) != 1 || e.Secrets[0].Reveal() != secret.Reveal() {
			t.Errorf("%s was registered again: disabled %t, and another secret signs", address, e.Disabled)
		}
	}
	for written, called := range map[string]string{
		"https://Bad.example/hook":      "https://bad.example/hook?x=1",
		"https://bad2.example:443/hook": "https://bad2.example/hook",
		"https://bad3.example/hook":     "https://bad3.example.:443/hook",
	} {
		d.must(DisableEndpoint(d.ctx, d.pool, written, by))
		if !disabled(called) {
			t.Errorf("%s is disabled, and %s is called", written, called)
		}
	}
	one, err := Register(d.ctx, d.pool, home, AddressPolicy{}, "https://Sign.example/h", by)
	d.must(err)
	other, err := Register(d.ctx, d.pool, home, AddressPolicy{}, "https://sign.example/h", by)
	d.must(err)
	if one.Reveal() != other.Reveal() {
		t.Error("one receiver has two secrets")
	}
	_, err = Rotate(d.ctx, d.pool, home, "https://SIGN.example:443/h", time.Hour, by)
	d.must(err)
	for _, address := range []string{"not a url", "ftp://acme.example/", "https:///path", "https://u:p@acme.example/"} {
		if err := DisableEndpoint(d.ctx, d.pool, address, by); !errors.Is(err, invalidation.ErrInvalid) {
			t.Errorf("disable %q: %v, want ErrInvalid", address, err)
		}
		if secrets, err := secretsOf(d.ctx, d.pool, home, address); !errors.Is(err, invalidation.ErrInvalid) {
			t.Errorf("secrets of %q: %d, %v, want ErrInvalid", address, len(secrets), err)
		}
	}
}

func TestRotatedSecretsBothSignUntilTheOldOneExpires(t *testing.T) {
	d := newFixture(t, atHome)
	first, err := Register(d.ctx, d.pool, home, atHome, d.receiver.URL, invalidation.By{Actor: "test", Reason: "a test"})
	d.must(err)
	second, err := Rotate(d.ctx, d.pool, home, d.receiver.URL, time.Hour, invalidation.By{Actor: "test", Reason: "a test"})
	d.must(err)
	d.finishWork(d.receiver.URL)
	d.must(d.deliver())
	d.must(Verify(d.header, time.Now(), d.body, first))
	d.must(Verify(d.header, time.Now(), d.body, second))
	_, err = Rotate(d.ctx, d.pool, home, d.receiver.URL, time.Hour, invalidation.By{Actor: "test", Reason: "sent again"})
	if !errors.Is(err, invalidation.ErrState) {
		t.Errorf("a rotation while the old secret signs: %v, want ErrState", err)
	}
	between, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL)
	d.must(err)
	if len(between.Secrets) != 2 || between.Secrets[1].Reveal() != first.Reveal() {
		t.Error("a second rotation has ended the overlap of the first")
	}
	_, err = d.pool.Exec(d.ctx, `UPDATE penstock.webhook_endpoint SET old_until = now()`)
	d.must(err)
	e, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL)
	d.must(err)
	if len(e.Secrets) != 1 || e.Secrets[0].Reveal() != second.Reveal() {
		t.Error("the old secret still signs after its time")
	}
	for range 2 { // a secret that has leaked goes at once, however often
		third, err := Rotate(d.ctx, d.pool, home, d.receiver.URL, 0, invalidation.By{Actor: "test", Reason: "it leaked"})
		d.must(err)
		e, err = FindEndpoint(d.ctx, d.pool, home, d.receiver.URL)
		d.must(err)
		if len(e.Secrets) != 1 || e.Secrets[0].Reveal() != third.Reveal() {
			t.Error("a secret signs on after a rotation without an overlap")
		}
	}
}

func TestForbiddenAddressIsNeverConnectedTo(t *testing.T) {
	d := newFixture(t, AddressPolicy{})
	d.finishWork(d.receiver.URL)
	_ = d.deliver()
	if len(d.ids) != 0 {
		t.Fatal("a loopback address was called")
	}
	if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'refused'`); n != 1 {
		t.Error("the callback is not a failure")
	}
	if _, err := Register(d.ctx, d.pool, home, AddressPolicy{}, d.receiver.URL, invalidation.By{Actor: "test", Reason: "a test"}); err == nil {
		t.Error("a loopback address was registered")
	}
}

// An attempt whose time passes while the receiver is down is used up, and one that an operator had tried again has ten.
func TestAttemptsAreUsedUpWhileTheReceiverIsDown(t *testing.T) {
	d := newFixture(t, atHome)
	d.finishWork(d.receiver.URL)
	down := target{id: withoutQuery(mustParse(t, d.receiver.URL)), host: d.receiver.URL, site: d.receiver.URL}
	for range 5 {
		f, _ := d.handler.deliverer.endpoints.enter(time.Now(), down)
		d.handler.deliverer.endpoints.leave(time.Now(), f, verdict{reason: "receiver answered 500"})
	}
	attempts := func(want int, sql string) {
		t.Helper()
		_, err := d.pool.Exec(d.ctx, sql)
		d.must(err)
		err = d.deliver()
		if err == nil {
			t.Fatal("delivered to a receiver that is down")
		}
		if n := d.count(`SELECT coalesce((SELECT attempt FROM penstock.entry_webhook), -1)`); n != want {
			t.Errorf("attempt %d, want %d: %v", n, want, err)
		}
	}
	attempts(1, `SELECT`) // the second is due within seconds, and the breaker is open for half a minute
	attempts(1, `SELECT`)
	attempts(2, `UPDATE penstock.entry_webhook SET created_at = now() - interval '5 minutes 50 seconds'`)
	d.older("4 days")
	attempts(-1, `UPDATE penstock.entry_webhook SET attempt = 9`)
	if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'refused' AND error LIKE '%receiver answered 500'`); n != 1 {
		t.Fatalf("%d failures, want the message with the last answer", n)
	}
	attempts(1, `SELECT penstock.retry_failure(entry_id, 'the receiver is back', 'test') FROM penstock.failure`)
}

// A message of last week that an operator had tried again has the times of the schedule between its attempts. One that was
// tried last week has no other attempt.
func TestAnOldMessageThatIsTriedAgainHasTheWholeSchedule(t *testing.T) {
	d := newFixture(t, atHome, slices.Repeat([]int{400}, 100)...)
	d.finishWork(d.receiver.URL)
	d.older("200h")
	for attempt := 1; attempt < len(waits); attempt++ {
		_ = d.deliver()
		wait := waits[attempt].Seconds()
		if n := d.count(fmt.Sprintf(`SELECT count(*) FROM penstock.entry_webhook
		    WHERE attempt = %d AND due_at BETWEEN now() + interval '%f s' AND now() + interval '%f s'`,
			attempt, wait-5, wait*1.2)); n != 1 {
			t.Fatalf("attempt %d is not planned for %s from now", attempt+1, waits[attempt])
		}
		d.older(fmt.Sprintf("%f s", wait))
	}
	_ = d.deliver()
	const failures = `SELECT count(*) FROM penstock.failure WHERE class = 'refused'`
	if n := d.count(failures); n != 1 {
		t.Fatalf("%d failures after the last attempt, want 1", n)
	}
	_, err := d.pool.Exec(d.ctx, `SELECT penstock.retry_failure(entry_id, 'the receiver is back', 'test') FROM penstock.failure`)
	d.must(err)
	_ = d.deliver()
	d.older("200h")
	_ = d.deliver()
	if n := d.count(failures); n != 1 {
		t.Errorf("%d failures after an attempt beyond the end, want 1", n)
	}
}

func mustParse(t *testing.T, address string) *url.URL {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

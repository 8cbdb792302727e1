package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// load is the clients. They speak HTTP and SQL by themselves, and record what they asked for and
// what they were told.
type load struct {
	leaders    []string // addresses of the API
	sql        string   // address of the database through the clients' link
	hook       string
	worker     *recorder
	http       *http.Client
	fresh      *http.Client // a connection for each request, which no earlier process has
	seed       uint64
	lease      time.Duration // of task nodes
	gateways   bool          // entries of onlineQueue are pushed
	atMostOnce bool          // entries of onceQueue are pushed
	long       bool          // solo entries take seconds, so that many nodes hold a lock when they are killed
	failing    bool          // solo entries take seconds, and end in an error at first
	ops        atomic.Int64
	work       sync.WaitGroup
	link       *pgproxy.Link   // of clients that speak SQL
	patient    context.Context // clients stop asking again when it ends
	db         *database

	mu       sync.Mutex
	pushes   []*judge.Push
	requests []judge.Request // to gateways
	batches  []judge.Batch
	asked    int // requests, also those that were repeated
}

func newLoad(
	patient context.Context,
	cfg config,
	leaders []string,
	link *pgproxy.Link,
	worker *recorder,
	db *database,
) *load {
	return &load{
		leaders: leaders, hook: worker.addr + "/hook", worker: worker, seed: cfg.seed, lease: cfg.lease,
		long: cfg.rare || cfg.kills, failing: cfg.stops, atMostOnce: cfg.before == "",
		gateways: cfg.gateways > 0, patient: patient, db: db, link: link,
		sql: fmt.Sprintf(
			"postgres://%s@%s/%s?sslmode=disable&connect_timeout=3&application_name=client",
			superuser,
			link.Address(),
			databaseName,
		),
		http:  &http.Client{Timeout: 12 * time.Second},
		fresh: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
}

// run pushes at a rate until ctx ends, or most operations have begun; 0: without that bound. What is
// pushed follows from the seed.
func (l *load) run(ctx context.Context, perSecond float64, most int64) {
	random := rand.New(rand.NewPCG(l.seed, 1))
	tick := time.NewTicker(time.Duration(float64(time.Second) / perSecond))
	defer tick.Stop()
	for most == 0 || l.ops.Load() < most {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		one := l.next(random)
		l.work.Add(1)
		go func() {
			defer l.work.Done()
			one()
		}()
	}
}

// wait returns when every client has its answer, or has given up.
func (l *load) wait() { l.work.Wait() }

// next makes the next operation.
func (l *load) next(random *rand.Rand) func() {
	op := l.ops.Add(1)
	p := &judge.Push{Op: op, Queue: "solo", FailMax: attemptsMax, CrashMax: crashesMax}
	in := payload{Op: op, MS: 5 + random.IntN(60)}
	body := map[string]any{}
	roll, again := random.IntN(100), random.IntN(5)
	switch {
	case roll < 6:
		return l.frail(p, in, random.IntN(6), random.Uint64())
	case roll < 12:
		return l.unique(p, in, random.IntN(4000))
	case roll < 13:
		return l.rated(p, in)
	case roll < 20: // solo
		if l.long {
			in.MS = 1000 + random.IntN(5000)
		}
		if l.gateways && op%2 == 0 { // on the slots that requests want as well
			p.Queue, in.Messages = onlineQueue, []string{"x"}
		}
	case roll < 42:
		ofKey(p, body, random.Int64N(keysInUse))
		in.MS = keyedMS(in.MS, roll, again)
	case roll < 48: // a key of two entries, of which the second is pushed while the first runs
		in.MS = 300 + random.IntN(600)
		pause := time.Duration(50+random.IntN(200)) * time.Millisecond
		return func() { l.pair(p, in, pause) }
	case roll < 58:
		p.Queue = "limited"
		// Claims of one lane exclude each other; only those of several meet at the limit.
		body["flow"] = "flow-" + strconv.Itoa(random.IntN(4))
		in.MS = 500 + random.IntN(700) // at the usual rate two of the three locks are held on average
	case roll < 62: // retried
		in.Fail = 1 + random.IntN(2)
		if op%2 == 0 {
			ofKey(p, body, op/2)
		}
	case roll < 68: // must not run twice, also where it is unknown whether it ran
		in.MS, in.Fail = 100+random.IntN(1400), random.IntN(2)
		if l.atMostOnce {
			p.Queue, p.Once = onceQueue, true
		}
	case roll < 75: // delayed
		p.Due = time.Now().Add(time.Duration(500+random.IntN(4000)) * time.Millisecond)
		body["due_at"] = p.Due
	case roll < 81: // cancelled while it waits
		p.Due, p.Cancel = time.Now().Add(time.Duration(1000+random.IntN(4000))*time.Millisecond), &judge.Cancel{}
		body["due_at"] = p.Due
		switch op % 3 {
		case 0:
			l.withCallback(p, body)
		case 1:
			ofKey(p, body, op/3)
		}
	case roll < 86:
		l.withCallback(p, body)
	case roll < 92:
		p.Queue, p.Effect = "work", true
	case roll < 96:
		p.Joint = true
		body["payload"] = in
		return func() { l.joint(p, in) }
	default:
		if roll == 99 && again < 3 {
			n := 5 + random.IntN(20)
			return func() { l.batch(n) }
		}
		in.MS = 1000 + random.IntN(5000) // a long run, often longer than a lease
	}
	if l.failing && roll < 20 {
		in.MS, in.Fail = 1000+random.IntN(2500), 1
	}
	body["payload"] = in
	return func() { l.push(p, body) }
}

// keysInUse are the lock keys that most entries of a key share.
const keysInUse = 6

// ofKey gives an entry one of these keys.
func ofKey(p *judge.Push, body map[string]any, n int64) {
	p.Queue, p.Key = "keyed", "key "+strconv.FormatInt(n%keysInUse, 10)
	body["lock_key"] = p.Key
}

// withCallback gives an entry a callback.
func (l *load) withCallback(p *judge.Push, body map[string]any) {
	p.Callback = true
	body["callback"] = map[string]any{"url": l.hook}
}

// keyedMS is how long a run of a key takes: one in ten 2 to 3 s, so that another one would be seen beside it however
// late the ends of calls are noted. Each key is in use for a quarter of the time by these at the usual rate.
func keyedMS(ms, roll, again int) int {
	if roll%2 == 0 && again == 0 {
		return 2000 + 15*ms
	}
	return ms / 2
}

// pair pushes two entries of a key that nothing else has, one after the other. What a finish overlooks stays for ever:
// no later push of the key makes it ready again.
func (l *load) pair(first *judge.Push, in payload, pause time.Duration) {
	second := *first
	second.Op = l.ops.Add(1)
	for _, p := range []*judge.Push{first, &second} {
		p.Queue, p.Key, in.Op = "keyed", "pair "+strconv.FormatInt(first.Op, 10), p.Op
		l.push(p, map[string]any{"lock_key": p.Key, "payload": in})
		time.Sleep(pause)
	}
}

func (l *load) record(p *judge.Push) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pushes = append(l.pushes, p)
}

// push accepts one entry over HTTP, asks again under the same key until it is told, and cancels the entry where the
// client is to change its mind.
func (l *load) push(p *judge.Push, body map[string]any) { l.pushAndCancel(p, body, func() {}) }

// pushAndCancel cancels, where it does, when await has returned, and a moment later.
func (l *load) pushAndCancel(p *judge.Push, body map[string]any, await func()) {
	defer func() { l.record(p) }()
	text, err := json.Marshal(body)
	if err != nil {
		return
	}
	p.Called = time.Now()
	var answer struct {
		ID int64 `json:"id"`
	}
	status := l.ask(p.Op, "/v1/queues/"+p.Queue+"/entries", fmt.Sprintf("op-%d", p.Op), text, &answer)
	p.Returned = time.Now()
	p.Told, p.Entry, p.Refused = status/100 == 2 && answer.ID != 0, answer.ID, status/100 == 4
	if p.Cancel == nil || !p.Told {
		return
	}
	await()
	time.Sleep(time.Duration(p.Op%7) * 100 * time.Millisecond)
	l.cancel(p)
}

// cancel asks for the end of an entry, and notes whether it has ended or will end.
func (l *load) cancel(p *judge.Push) {
	p.Cancel.Called = time.Now()
	var answer struct {
		Verdict string `json:"verdict"`
	}
	const reason = `{"reason": "the client changed its mind"}`
	status := l.ask(p.Op, fmt.Sprintf("/v1/entries/%d/cancel", p.Entry), "", []byte(reason), &answer)
	p.Cancel.Returned = time.Now()
	told := status/100 == 2
	p.Cancel.Cancelled = told && answer.Verdict == "cancelled"
	p.Cancel.Requested = told && answer.Verdict == "requested"
}

// ask posts until there is an answer that is final, and returns its status; 0 if there was none.
func (l *load) ask(op int64, path, key string, body []byte, into any) int {
	for try := int64(0); l.patient.Err() == nil; try++ {
		l.mu.Lock()
		l.asked++
		l.mu.Unlock()
		status, err := l.once(l.leaders[(op+try)%int64(len(l.leaders))]+path, key, body, into)
		final := err == nil && status < 500 && status != http.StatusRequestTimeout &&
			status != http.StatusTooManyRequests
		if final && (status != http.StatusConflict || key == "") {
			return status
		}
		time.Sleep(time.Duration(50+rand.IntN(200)) * time.Millisecond)
	}
	return 0
}

func (l *load) once(url, key string, body []byte, into any) (int, error) {
	ctx, cancel := context.WithTimeout(l.patient, 12*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", strconv.Quote(key))
	}
	answer, err := l.http.Do(r)
	if err != nil {
		return 0, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, err // the answer broke off: nobody knows
	}
	if answer.StatusCode/100 == 2 {
		err = json.Unmarshal(text, into)
	}
	return answer.StatusCode, err
}

// joint pushes in a transaction of the client's own, with a row of the client's own. It is not
// repeated.
func (l *load) joint(p *judge.Push, in payload) {
	defer func() { l.record(p) }()
	text, err := json.Marshal(in)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(l.patient, 15*time.Second)
	defer cancel()
	p.Called = time.Now()
	conn, err := pgx.Connect(ctx, l.sql)
	if err != nil {
		return
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var entry int64
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO judge.client_row VALUES ($1)`, p.Op); err != nil {
			return err
		}
		return tx.QueryRow(ctx, `SELECT penstock.push('solo', $1::jsonb)`, string(text)).Scan(&entry)
	})
	p.Returned = time.Now()
	if err == nil {
		p.Told, p.Entry = true, entry
	}
}

// batch makes a batch of n items, past the proxy: what is tried are its parts. It is not repeated.
func (l *load) batch(n int) {
	ctx, cancel := context.WithTimeout(l.patient, time.Minute)
	defer cancel()
	const sql = `
SELECT penstock.create_batch('b', 'parts', jsonb_build_object('part_size', 3, 'items',
       (SELECT jsonb_agg(jsonb_build_object('b', $1::bigint, 'i', i)) FROM generate_series(1, $2::int) i)))`
	b := judge.Batch{Label: l.ops.Add(1), Items: n}
	_, err := l.db.pool.Exec(ctx, sql, b.Label, b.Items)
	b.Told, b.Returned = err == nil, time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.batches = append(l.batches, b)
}

// tell asks the API how entries ended.
func (l *load) tell(ctx context.Context, entries []int64) (told []judge.Told, err error) {
	for i, id := range entries {
		r, err := http.NewRequestWithContext(
			ctx,
			http.MethodGet,
			fmt.Sprintf("%s/v1/entries/%d", l.leaders[i%len(l.leaders)], id),
			nil,
		)
		if err != nil {
			return nil, err
		}
		answer, err := l.http.Do(r)
		if err != nil {
			return nil, err
		}
		var state struct {
			State string `json:"state"`
		}
		err = json.NewDecoder(answer.Body).Decode(&state)
		answer.Body.Close()
		if err != nil {
			return nil, err
		}
		told = append(told, judge.Told{Entry: id, State: state.State})
	}
	return told, nil
}

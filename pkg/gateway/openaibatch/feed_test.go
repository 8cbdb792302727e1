package openaibatch

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

// requestLine is a line of an input file.
const requestLine = `{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}` + "\n"

// begun makes a batch of a file that is validated, whose lines are requestLine at these offsets, on a queue "q".
func (s *shop) begun(text string, at ...int) batchRow {
	s.Helper()
	b := s.create(s.file(text))
	s.exec(`UPDATE penstock.gateway_batch SET status = 'in_progress', total = $1, model = 'm',
	               queue_id = (SELECT id FROM penstock.queue WHERE name = 'q')`, len(at))
	for i, offset := range at {
		s.exec(`INSERT INTO penstock.gateway_batch_line (batch_id, line, at, bytes, custom_id) VALUES ($1, $2, $3, $4, 'a')`,
			b.ID, i+1, offset, len(requestLine))
	}
	return b
}

// Lines that are read in one turn lie within feedBytesMax of the file: blanks between them count.
func TestTurnReadsABoundedPartOfAFileWithGaps(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	gap := strings.Repeat("\n", feedBytesMax-2*len(requestLine)) // with a line on each side it just fits
	text := requestLine + gap + requestLine + requestLine + gap + "\n" + requestLine
	second := len(requestLine) + len(gap)
	third := second + len(requestLine)
	fourth := third + len(requestLine) + len(gap) + 1
	b := s.begun(text, 0, second, third, fourth)
	var got []int
	for range 3 {
		s.step1(b)
		got = append(got, s.again(b).Fed)
	}
	if fmt.Sprint(got) != "[2 3 4]" {
		t.Errorf("after each turn %v lines are fed, want [2 3 4]", got)
	}
}

// While a queue is full what has ended is collected, and as much is fed as there is room for.
func TestBatchOnAFullQueueIsCollected(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{"capacity": 3}')`)
	q, err := invalidation.Open(t.Context(), s.pool, "q")
	if err != nil {
		t.Fatal(err)
	}
	usual := invalidation.Push{Payload: json.RawMessage(`{}`)}
	pushed, err := q.Push(t.Context(), usual, usual, usual)
	if err != nil {
		t.Fatal(err)
	}
	cancel := func(i int) { s.exec(`SELECT penstock.cancel_entry($1, 'test', 'test')`, int64(pushed[i].ID)) }
	const n = len(requestLine)
	b := s.begun(strings.Repeat(requestLine, 4), 0, n, 2*n, 3*n)
	s.exec(`UPDATE penstock.gateway_batch SET fed = 1`)
	cancel(0) // it is the entry of the first line; another push takes its room
	s.exec(`UPDATE penstock.gateway_batch_line SET entry_id = $1 WHERE line = 1`, int64(pushed[0].ID))
	if _, err := q.Push(t.Context(), usual); err != nil {
		t.Fatal(err)
	}
	s.step1(b)
	if b = s.again(b); b.Failed != 1 || b.Fed != 1 || b.FailedTurns != 0 {
		t.Errorf("%d lines were collected and %d fed after %d failures, want 1, 1, 0", b.Failed, b.Fed, b.FailedTurns)
	}
	cancel(1)
	s.step1(b)
	if b = s.again(b); b.Fed != 2 {
		t.Errorf("%d lines are fed, want 2: there is room for one", b.Fed)
	}
}

// Lines become entries as the rate of the client's token lets them in, and what a full queue refused is not spent.
func TestLinesAreWithinTheRateOfTheToken(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{"capacity": 2}')`)
	s.gateway.SetTokens([]gateway.TokenState{{Name: "shop", PushRate: 0.0001, PushBurst: 4}})
	const n = len(requestLine)
	b := s.begun(strings.Repeat(requestLine, 6), 0, n, 2*n, 3*n, 4*n, 5*n)
	var fed []int
	for range 3 {
		s.step1(b)
		fed = append(fed, s.again(b).Fed)
		s.exec(`SELECT penstock.alter_queue('q', '{"capacity": 100}')`)
	}
	if fmt.Sprint(fed) != "[2 4 4]" {
		t.Errorf("%v lines are fed after each turn, want [2 4 4]", fed)
	}
}

// A batch whose lines wait for the rate of a token does not look for room without a pause, however little the token lets
// in at once.
func TestABatchThatARateBoundsRests(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	begins := make([]int, 20) // of lines, more than three turns let in
	for i := range begins {
		begins[i] = i * len(requestLine)
	}
	s.begun(strings.Repeat(requestLine, len(begins)), begins...)
	s.exec(`CREATE TABLE public.turn AS SELECT interval '0' AS rests`) // as each statement sets it
	s.exec(`CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
		    UPDATE public.turn SET rests = NEW.next_at - statement_timestamp();
		    RETURN NULL;
		END $$`)
	s.exec(`CREATE TRIGGER note AFTER UPDATE OF next_at ON penstock.gateway_batch
		FOR EACH ROW EXECUTE FUNCTION public.note()`)
	for _, c := range []struct {
		rate float64
		want time.Duration
	}{{1000, limitedLeast}, {20, 200 * time.Millisecond}, {4, workEvery}} {
		s.gateway.SetTokens([]gateway.TokenState{{Name: "shop", PushRate: c.rate, PushBurst: 4}})
		s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp()`)
		if !s.turn(t.Context()) {
			t.Fatal("no batch was due")
		}
		var rests time.Duration
		if err := s.pool.QueryRow(t.Context(), `SELECT rests FROM public.turn`).Scan(&rests); err != nil || rests < c.want {
			t.Errorf("at %v lines a second, 4 at once, the batch rests %v, want %v (%v)", c.rate, rests, c.want, err)
		}
		if pause := s.pause(); pause != c.want {
			t.Errorf("at %v lines a second, 4 at once, the next pass is in %v, want %v", c.rate, pause, c.want)
		}
	}
}

// Lines of a batch come behind requests whose clients wait, in a queue that is as it was made.
func TestLinesComeBehindRequestsWhoseClientsWait(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	s.step1(s.begun(requestLine, 0))
	q, err := invalidation.Open(t.Context(), s.pool, "q")
	if err == nil {
		_, err = q.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{}`)})
	}
	var line, request int
	if err == nil {
		err = s.pool.QueryRow(t.Context(), `SELECT min(priority), max(priority) FROM penstock.ready`).Scan(&line, &request)
	}
	if err != nil || line >= request {
		t.Errorf("a line has priority %d, a request %d: %v", line, request, err)
	}
}

// A batch goes on while its client has a valid token, and is cancelled once it has none.
func TestABatchEndsWithTheLastTokenOfItsClient(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	for _, token := range []string{"old", "new"} {
		s.exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by)
		        VALUES ('shop', sha256($1), '{call}', 'test')`, []byte(token))
	}
	s.exec(`UPDATE penstock.api_token SET revoked_at = clock_timestamp() WHERE hash = sha256('old')`)
	b := s.begun(requestLine+requestLine, 0, len(requestLine))
	s.step1(b)
	if b = s.again(b); b.Status != inProgress || b.Fed != 2 {
		t.Fatalf("the batch is %s with %d lines fed, though its client has a token", b.Status, b.Fed)
	}
	s.exec(`UPDATE penstock.api_token SET expires_at = clock_timestamp() WHERE hash = sha256('new')`)
	s.exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by)
	        VALUES ('shop', sha256('queue'), '{push}', 'test')`) // with it the client may not call
	for range 5 {
		s.step1(b)
		if b = s.again(b); b.Status == cancelled {
			break
		}
	}
	if b.Status != cancelled || b.Failed != 2 {
		t.Errorf("the batch is %s with %d lines failed, want cancelled with 2", b.Status, b.Failed)
	}
}

// A failure that is in the error file of a batch is not run again by a retry: the client sends the line again, and
// nobody collects another answer.
func TestAFailureInTheErrorFileIsNotRetried(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	b := s.begun(requestLine+requestLine, 0, len(requestLine))
	s.step1(b)
	var id int64
	if err := s.pool.QueryRow(t.Context(), `SELECT entry_id FROM penstock.gateway_batch_line WHERE line = 1`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	var names int // one each, or max_concurrent_per_name of the queue would bound the lines of a batch
	err := s.pool.QueryRow(t.Context(), `SELECT count(DISTINCT name) FROM penstock.entry WHERE name LIKE $1 || '/%'`, b.ID).
		Scan(&names)
	if err != nil || names != 2 {
		t.Errorf("two lines have %d names that begin with the batch, %v", names, err)
	}
	fail := func() {
		s.exec(`WITH e AS (DELETE FROM penstock.entry WHERE id = $1 RETURNING *), r AS (DELETE FROM penstock.ready WHERE entry_id = $1)
			INSERT INTO penstock.failure (queue_id, entry_id, created_at, attempt, crashes, flow, name, priority, payload, error, class, fingerprint)
			SELECT queue_id, id, created_at, 1, 0, flow, name, priority, payload, 'x', 'x', 'x' FROM e`, id)
	}
	refused := func(sql string, args ...any) string {
		_, err := s.pool.Exec(t.Context(), sql, args...)
		return postgres.Code(err)
	}
	const one, all = `SELECT penstock.retry_failure($1, '', 'ada')`, `SELECT penstock.start_operation('q', 'retry_failures', '{"all": true}')`
	fail()
	if code := refused(one, id); code != "" {
		t.Errorf("a retry before the failure is collected: %s, want that the line goes on", code)
	}
	fail()
	s.step1(b)
	if b = s.again(b); b.Failed != 1 {
		t.Fatalf("%d lines have failed, want 1", b.Failed)
	}
	if one, all := refused(one, id), refused(all); one != "PS006" || all != "PS006" {
		t.Errorf("retries of a failure in the error file: %q and %q, want PS006", one, all)
	}
}

// Failures of lines have the status of the server's answer, as clients look for it, where the last run had one.
func TestALineThatTheServerRefusedHasItsResponse(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	b := s.begun(strings.Repeat(requestLine, 3), 0, len(requestLine), 2*len(requestLine))
	s.step1(b)
	for line, history := range map[int]string{
		1: `[{"meta": {"status": 500}}, {"error": "x", "meta": {"outcome": "rejected", "status": 400}}]`,
		2: `[{"meta": {"status": 500}}, {"error": "x"}]`,
		3: `[{"error": "x", "meta": {"outcome": "failed", "status": 200}}]`,
	} {
		s.exec(`WITH e AS (DELETE FROM penstock.entry WHERE id = (SELECT entry_id FROM penstock.gateway_batch_line WHERE line = $1) RETURNING *)
			INSERT INTO penstock.failure (queue_id, entry_id, created_at, attempt, crashes, flow, priority, payload, error, class, fingerprint, history)
			SELECT queue_id, id, created_at, 1, 0, flow, priority, payload, 'too long', 'input', 'x', $2::jsonb FROM e`, line, history)
	}
	s.step1(b)
	var text string
	if err := s.pool.QueryRow(t.Context(), `SELECT string_agg(convert_from(c.data, 'UTF8'), '' ORDER BY c.no)
		FROM penstock.gateway_file_chunk c WHERE c.file_id = $1`, b.Errors).Scan(&text); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if len(lines) != 3 {
		t.Fatalf("got %s", text)
	}
	for i, want := range []string{
		`"status_code":400,"request_id":"req_`, `"response":null,"error":{"code":"input","message":"too long"}`,
		`"response":null,"error":{"code":"input","message":"too long"}`,
	} {
		if !strings.Contains(lines[i], want) {
			t.Errorf("line %d: got %s", i+1, lines[i])
		}
	}
	const body = `"body":{"error":{"message":"too long","type":"invalid_request_error","param":null,"code":"input"}}},"error":null}`
	if !strings.HasSuffix(lines[0], body) {
		t.Errorf("got %s", lines[0])
	}
}

// A batch of which no entry ends rests longer after each turn, up to 2 s, and no longer than at first once one has ended.
// Its entries are looked up: no day of results or failures is, where each entry is there.
func TestABatchWhoseEntriesRunRestsAndReadsNoOutcomes(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	s.exec(`SELECT penstock.create_queue('q', '{}')`)
	b := s.begun(requestLine+requestLine, 0, len(requestLine))
	s.exec(`CREATE TABLE public.rest AS SELECT interval '0' AS lasts`) // as each statement sets it
	s.exec(`CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN UPDATE public.rest SET lasts = NEW.next_at - clock_timestamp(); RETURN NULL; END $$`)
	s.exec(`CREATE TRIGGER note AFTER UPDATE OF next_at ON penstock.gateway_batch
		FOR EACH ROW EXECUTE FUNCTION public.note()`)
	rest := func() (d time.Duration) {
		s.Helper()
		s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp()`)
		if !s.turn(t.Context()) {
			t.Fatal("no batch was due")
		}
		var left float64
		err := s.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM lasts)::float8 FROM public.rest`).Scan(&left)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(math.Ceil(max(0, left)/workEvery.Seconds())) * workEvery
	}
	var rests []time.Duration
	for range 6 { // the first one feeds the lines
		rests = append(rests, rest())
	}
	if got := fmt.Sprint(rests); got != "[0s 500ms 1s 2s 2s 2s]" {
		t.Errorf("the batch rests %s after its turns", got)
	}
	for _, scan := range s.scansOfOutcomes(s.again(b)) {
		if !strings.Contains(scan, "never executed") {
			t.Errorf("outcomes are read of entries that have not ended: %s", scan)
		}
	}
	s.exec(`SELECT penstock.cancel_entry(entry_id, 'test', 'test') FROM penstock.gateway_batch_line WHERE line = 1`)
	if moved, next := rest(), rest(); moved != 0 || next != workEvery {
		t.Errorf("after an entry has ended the batch rests %s and then %s", moved, next)
	}
}

// scansOfOutcomes are the lines of the plan of the statement that reads what has ended, as it ran, that read outcomes.
func (s *shop) scansOfOutcomes(b batchRow) (scans []string) {
	s.Helper()
	rows, err := s.pool.Query(s.Context(), `EXPLAIN (ANALYZE, TIMING OFF) `+endedSQL, b.ID, b.QueueID, windowLines)
	if err != nil {
		s.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		s.Fatal(err)
	}
	for _, line := range lines {
		if strings.Contains(line, " on result") || strings.Contains(line, " on failure") {
			scans = append(scans, line)
		}
	}
	return scans
}

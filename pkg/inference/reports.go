package inference

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Reports receives reports of asynchronous workers, in any process that has the key: the end of a
// run is kept with the run, where the node that follows it reads it. So no report is lost with the
// process that took it, nor with the node.
type Reports struct {
	base string // URL under which workers reach such a process
	key  []byte
	db   postgres.DB
	log  *slog.Logger

	mu          sync.Mutex
	subscribers map[*subscriber]struct{}
	polling     bool
}

// subscriber is a run that is followed here.
type subscriber struct {
	run     remoteRun
	model   worker.Model
	request json.RawMessage     // the payload of its entry
	reports chan worker.Outcome // takes one
}

// NewReports returns the receiver of reports under base, a URL, whose addresses cannot be guessed by clients
// that do not have key. All processes of an installation share the key. Base may be empty where reports are
// taken and no runs are started.
func NewReports(base string, key []byte, db postgres.DB, log *slog.Logger) *Reports {
	log = cmp.Or(log, slog.Default())
	return &Reports{
		base: strings.TrimSuffix(base, "/"), key: key, db: db, log: log,
		subscribers: map[*subscriber]struct{}{},
	}
}

// keyBytesMin is the least length of a key that clients cannot guess.
const keyBytesMin = 16

// OpenReports returns the receiver of reports under base with the key to which an option of a program refers, env:NAME
// or file:/path. Its errors name the option.
func OpenReports(option, ref, base string, db postgres.DB, log *slog.Logger) (*Reports, error) {
	if ref == "" {
		return nil, fmt.Errorf("%s is missing: want env:NAME or file:/path", option)
	}
	key, err := worker.ReadSecret(ref)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", option, err)
	}
	if len(key) < keyBytesMin {
		return nil, fmt.Errorf("%s has %d bytes: want %d or more random ones, such as those of `openssl rand "+
			"-base64 32`", option, len(key), keyBytesMin)
	}
	return NewReports(base, []byte(key), db, log), nil
}

// address of the reports on one lock of an entry, as pkg/api serves it.
func (rs *Reports) address(entry string, token int64) string {
	return fmt.Sprintf("%s/tasks/callback/%s?token=%d&key=%s", rs.base, entry, token,
		worker.CallbackToken(rs.key, entry, token))
}

// Known says whether key is that of the address for reports on one lock of an entry.
func (rs *Reports) Known(entry, token int64, key string) bool {
	return worker.CheckCallbackToken(rs.key, strconv.FormatInt(entry, 10), token, key)
}

// reportedSQL reads the state of entry $1: whether it has ended, the holder of its lock, which run
// of it is stored.
const reportedSQL = `
SELECT f.queue_id, f.ended IS NOT NULL, coalesce(l.token, 0), coalesce(r.token, 0), coalesce(r.remote_id, ''),
       coalesce(m.name, ''), m.config, m.override
  FROM penstock.find_entry($1) f
  LEFT JOIN LATERAL (SELECT lock_key FROM penstock.entry WHERE queue_id = f.queue_id AND id = $1 OFFSET 0) e ON true
  LEFT JOIN LATERAL (SELECT token FROM penstock.lock
                      WHERE queue_id = f.queue_id AND lock_key = penstock.record_key(e.lock_key, $1) OFFSET 0) l ON true
  LEFT JOIN LATERAL (SELECT token, remote_id, instance_id FROM penstock.remote_run
                      WHERE queue_id = f.queue_id AND entry_id = $1 OFFSET 0) r ON true
  LEFT JOIN LATERAL (SELECT model FROM penstock.instance WHERE id = r.instance_id OFFSET 0) i ON true
  LEFT JOIN LATERAL (SELECT name, config, override FROM penstock.model WHERE name = i.model OFFSET 0) m ON true
 WHERE f.queue_id IS NOT NULL`

// Take stores the report of a worker about the run that was started under a token; the first report
// of its end counts. It returns false if the run is not stored yet and the worker must come again,
// ErrLockLost if the run is over because its lock was lost, and ErrState if the entry has ended
// otherwise.
func (rs *Reports) Take(ctx context.Context, entry, token int64, body []byte) (kept bool, err error) {
	var (
		ended            bool
		lock             int64
		name             string
		config, override []byte
	)
	r := remoteRun{Entry: invalidation.EntryID(entry)}
	err = rs.db.QueryRow(ctx, reportedSQL, entry).Scan(&r.Queue, &ended, &lock, &r.Token, &r.Remote, &name, &config,
		&override)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, fmt.Errorf("report on entry %d: %w", entry, invalidation.ErrEntryNotFound)
	case err != nil:
		return false, fmt.Errorf("report on entry %d: %w", entry, err)
	case ended:
		return rs.repeated(ctx, r.Entry, token)
	case r.Token != token && lock == token:
		return false, nil
	case r.Token != token || name == "":
		return false, fmt.Errorf("report on entry %d: %w: the run under token %d is not followed any more; stop it",
			entry, invalidation.ErrLockLost, token)
	}
	model, err := worker.ReadModel(name, config, override)
	if err != nil {
		return false, err
	}
	if int64(len(body)) > model.MaxResponseBytes {
		return false, fmt.Errorf("report on entry %d: max_response_bytes of the model is %d: %w", entry,
			model.MaxResponseBytes, invalidation.ErrPayloadTooLarge)
	}
	if err := invalidation.CheckJSON(body); err != nil {
		return false, fmt.Errorf("report on entry %d: %w", entry, err)
	}
	o, err := model.ReadReport(worker.RunRef{Entry: strconv.FormatInt(entry, 10), Token: token, Remote: r.Remote}, body)
	if err != nil {
		return false, fmt.Errorf("%w: %w", invalidation.ErrInvalid, err)
	}
	if !o.Final() {
		return true, nil // it goes on, as a poll will say
	}
	return saveReport(ctx, rs.db, r, body)
}

// repeated answers for an entry that has ended: well if it was by this report, whose answer may
// have been lost.
func (rs *Reports) repeated(ctx context.Context, entry invalidation.EntryID, token int64) (bool, error) {
	e, err := invalidation.Outcome(ctx, rs.db, entry)
	switch {
	case err != nil:
		return false, fmt.Errorf("report on entry %d: %w", entry, err)
	case int64(e.Token) != token:
		return false, fmt.Errorf("report on entry %d: %w: it has ended (%s) under token %d, and what token %d "+
			"reports changes nothing", entry, invalidation.ErrState, e.Outcome, e.Token, token)
	}
	return true, nil
}

// subscribe prepares for reports on a run that was started under token. Protocols without them need
// none.
func (d *dispatch) subscribe(token int64) (<-chan worker.Outcome, func()) {
	c := d.reports
	if c == nil || d.shared() || d.model.Type != worker.TypeAsync || (d.model.Protocol != worker.ProtocolCog &&
		d.model.Protocol != worker.ProtocolGeneric) {
		return nil, func() {}
	}
	d.call.Callback = c.address(d.call.Entry, token)
	l := &subscriber{
		run: remoteRun{Queue: d.run.Queue.ID, Entry: d.run.Entry.ID, Token: token}, model: d.model,
		request: d.call.Payload,
		reports: make(chan worker.Outcome, 1),
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.subscribers[l] = struct{}{}
	if !c.polling {
		c.polling = true
		go c.poll()
	}
	return l.reports, func() {
		c.mu.Lock()
		delete(c.subscribers, l)
		c.mu.Unlock()
	}
}

// reportsPause is between two queries for reports, one for all runs that are followed here.
const reportsPause = 250 * time.Millisecond

// poll reads reports until no run is followed any more.
func (rs *Reports) poll() {
	var failing duty.Failing
	for {
		time.Sleep(reportsPause)
		rs.mu.Lock()
		all := slices.Collect(maps.Keys(rs.subscribers))
		rs.polling = len(all) > 0
		rs.mu.Unlock()
		if len(all) == 0 {
			return
		}
		failing.Note(context.Background(), rs.log, slog.LevelWarn, "read reports of workers", rs.readReports(all))
	}
}

const readReportsSQL = `
SELECT w.n, r.report
  FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) WITH ORDINALITY w(queue_id, entry_id, token, n)
 CROSS JOIN LATERAL (SELECT report FROM penstock.remote_run
                      WHERE queue_id = w.queue_id AND entry_id = w.entry_id AND token = w.token
                        AND report IS NOT NULL OFFSET 0) r`

func (rs *Reports) readReports(all []*subscriber) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	queues, entries, tokens := make([]int32, len(all)), make([]int64, len(all)), make([]int64, len(all))
	for i, l := range all {
		queues[i], entries[i], tokens[i] = l.run.Queue, int64(l.run.Entry), l.run.Token
	}
	rows, err := rs.db.Query(ctx, readReportsSQL, queues, entries, tokens)
	if err != nil {
		return err
	}
	var n int64
	var body json.RawMessage
	_, err = pgx.ForEachRow(rows, []any{&n, &body}, func() error {
		all[n-1].deliver(body)
		return nil
	})
	return err
}

func (l *subscriber) deliver(body []byte) {
	run := worker.RunRef{Entry: strconv.FormatInt(int64(l.run.Entry), 10), Token: l.run.Token, Request: l.request}
	o, err := l.model.ReadReport(run, body)
	if err != nil || !o.Final() {
		return // the model reads it otherwise than when it was taken: polls will tell
	}
	select {
	case l.reports <- o:
	default:
	}
}

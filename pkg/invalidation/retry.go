package invalidation

import (
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duration"
)

// RetryPolicy sets the attempts and the backoff after errors. A zero field means its default.
type RetryPolicy struct {
	MaxAttempts int     `json:"max_attempts,omitempty"` // 25; the first run counts: 1 is for no retries
	Base        Seconds `json:"base,omitempty"`         // wait after the first error: 1 s
	Factor      float64 `json:"factor,omitempty"`       // by which each wait exceeds the one before: 2
	Cap         Seconds `json:"cap,omitempty"`          // longest wait before jitter: 1 h, with a model 30 s
	// Jitter is the share of the wait that is added at random, up to 1: 0.1. It only adds: a
	// requested wait is never shortened. 0 is the default, and 0.001 hardly any.
	Jitter float64 `json:"jitter,omitempty"`
	// Classes overrides single fields for errors of a class, such as "input": {"max_attempts": 1}.
	Classes map[string]RetryPolicy `json:"classes,omitempty"`
}

// Seconds is a duration that JSON writes as a number of seconds.
type Seconds = duration.Seconds

func (p RetryPolicy) isZero() bool {
	return p.MaxAttempts == 0 && p.Base == 0 && p.Factor == 0 && p.Cap == 0 && p.Jitter == 0 && len(p.Classes) == 0
}

func (p RetryPolicy) check() error {
	switch {
	case p.MaxAttempts < 0:
		return fmt.Errorf("retry.max_attempts is negative: %w", ErrInvalid)
	case p.Base < 0 || p.Cap < 0:
		return fmt.Errorf("retry.base and retry.cap must not be negative: %w", ErrInvalid)
	case p.Factor != 0 && p.Factor < 1:
		return fmt.Errorf("retry.factor is below 1: %w", ErrInvalid)
	case p.Jitter < 0 || p.Jitter > 1:
		return fmt.Errorf("retry.jitter is not between 0 and 1: %w", ErrInvalid)
	}
	for class, c := range p.Classes {
		if len(c.Classes) > 0 {
			return fmt.Errorf("retry.classes.%s has classes of its own: %w", class, ErrInvalid)
		}
		if err := c.check(); err != nil {
			return fmt.Errorf("retry.classes.%s: %w", class, err)
		}
	}
	return nil
}

// modelRetryCap is the longest wait between tries of a queue with a model, where its policy names none: its
// errors are mostly those of workers, which are back within minutes.
const modelRetryCap = Seconds(30 * time.Second)

// retryPolicy is the queue's policy with the defaults that depend on its kind.
func (c Config) retryPolicy() RetryPolicy {
	p := c.Retry
	if c.Model != "" && p.Cap == 0 {
		p.Cap = modelRetryCap
	}
	return p
}

// class is the policy for errors of one class, with every default filled in.
func (p RetryPolicy) class(name string) RetryPolicy {
	over := func(base, special RetryPolicy) RetryPolicy {
		if special.MaxAttempts != 0 {
			base.MaxAttempts = special.MaxAttempts
		}
		if special.Base != 0 {
			base.Base = special.Base
		}
		if special.Factor != 0 {
			base.Factor = special.Factor
		}
		if special.Cap != 0 {
			base.Cap = special.Cap
		}
		if special.Jitter != 0 {
			base.Jitter = special.Jitter
		}
		return base
	}
	defaults := RetryPolicy{
		MaxAttempts: 25, Base: Seconds(time.Second), Factor: 2, Cap: Seconds(time.Hour),
		Jitter: 0.1,
	}
	return over(over(defaults, p), p.Classes[name])
}

// Next returns whether an entry is tried again after an error of this class, and after which wait.
// attempts counts the runs that ended in error, this one included; random is a number in [0, 1).
// The wait is exponential with a cap.
func (p RetryPolicy) Next(class string, attempts int, random float64) (time.Duration, bool) {
	c := p.class(class)
	if attempts >= c.MaxAttempts {
		return 0, false
	}
	wait := math.Min(float64(c.Base)*math.Pow(c.Factor, float64(attempts-1)), float64(c.Cap))
	return time.Duration(wait * (1 + c.Jitter*random)), true
}

// retrySQL sends entries $4 back to initial until $5 milliseconds from now. Retries ($7 true) spend an
// attempt and write the error to the history; entries that are postponed spend nothing. History keeps the
// newest 20 errors. An entry that is retried has started, so that its start_by binds no more. $10 are the attempts
// that the claim saw, null for unknown: a retry that is settled again finds another number and changes nothing.
const retrySQL = `
WITH found AS MATERIALIZED (
    SELECT k.*, e.row
      FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::jsonb[], $7::boolean[], $9::bigint[],
            $10::int[]) k(lock_key, token, id, delay_ms, error, spent, run_ms, attempt)
     CROSS JOIN LATERAL (
           SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
     CROSS JOIN LATERAL (
           SELECT ctid AS row, attempt FROM penstock.entry_X WHERE queue_id = $1 AND id = k.id OFFSET 0) e
     WHERE NOT k.spent OR k.attempt IS NULL OR e.attempt = k.attempt
), later AS (
    UPDATE penstock.entry_X d
       SET status = 'initial', due_at = clock_timestamp() + f.delay_ms * interval '1 millisecond',
           attempt = least(d.attempt + f.spent::int, 32767),
           start_by = CASE WHEN NOT f.spent THEN d.start_by END,
           history = CASE WHEN f.spent
               THEN penstock.history_add(d.history, penstock.run_note(d.attempt + 1, f.error, $8, f.run_ms))
               ELSE d.history END
      FROM found f
     WHERE d.ctid = f.row
    RETURNING d.id
)
SELECT penstock.all_ended((SELECT count(*) FROM found), (SELECT count(*) FROM later))`

func (q *Queue) addRetry(batch *pgx.Batch, node NodeID, endings []Ending) {
	c := pick(endings, is(verbRetry, verbPostpone))
	if len(c.ids) > 0 {
		batch.Queue(q.sql.retry, q.ID, c.keys, c.tokens, c.ids,
			each(c, func(e *Ending) int64 { return e.delay.Milliseconds() }),
			each(c, func(e *Ending) Failure { return e.failure.clean() }),
			each(c, func(e *Ending) bool { return e.verb == verbRetry }), node, c.ran,
			each(c, func(e *Ending) *int { return e.Lock.attempt(e.Entry) }))
	}
}

// startedSQL makes start_by bind entries $4 no more, which are handed back after their start.
const startedSQL = `
WITH found AS MATERIALIZED (
    SELECT e.row
      FROM unnest($2::text[], $3::bigint[], $4::bigint[]) k(lock_key, token, id)
     CROSS JOIN LATERAL (
           SELECT FROM penstock.lock WHERE queue_id = $1 AND lock_key = k.lock_key AND token = k.token OFFSET 0) l
     CROSS JOIN LATERAL (
           SELECT ctid AS row, start_by FROM penstock.entry_X WHERE queue_id = $1 AND id = k.id OFFSET 0) e
     WHERE e.start_by IS NOT NULL
), unbound AS (
    UPDATE penstock.entry_X d SET start_by = NULL FROM found f WHERE d.ctid = f.row RETURNING d.id
)
SELECT penstock.all_ended((SELECT count(*) FROM found), (SELECT count(*) FROM unbound))`

func (q *Queue) addStarted(batch *pgx.Batch, endings []Ending) {
	if c := pick(endings, (*Ending).unbinds); len(c.ids) > 0 {
		batch.Queue(q.sql.started, q.ID, c.keys, c.tokens, c.ids)
	}
}

// unbinds reports whether the ending is a release that removes start_by from its entry. Any other release changes no
// entry.
func (e *Ending) unbinds() bool {
	return e.verb == verbRelease && e.started && e.Lock.hasStartBy(e.Entry)
}

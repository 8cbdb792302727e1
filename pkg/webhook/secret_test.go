package webhook

import (
	"errors"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// older lets time pass for the callbacks that wait.
func (d *fixture) older(by string) {
	d.Helper()
	_, err := d.pool.Exec(d.ctx, `
	    UPDATE penstock.entry_webhook
	       SET created_at = created_at - $1::interval,
	           history = (SELECT jsonb_agg(n || jsonb_build_object('at', (n->>'at')::timestamptz - $1::interval))
	                        FROM jsonb_array_elements(history) n)`, by)
	d.must(err)
}

// Without a key callbacks wait; none is sent unsigned, and none is lost while its attempts could go on.
func TestCallbackWaitsForAKey(t *testing.T) {
	d := newFixture(t, atHome)
	d.handler.vault = Vault{}
	d.finishWork(d.receiver.URL)
	for _, hours := range []string{"0h", "40h", "50h"} {
		d.older(hours)
		if err := d.deliver(); err == nil || hours == "0h" && !errors.Is(err, ErrNoKey) {
			t.Fatalf("delivered without a key: %v", err)
		}
		if n := d.count(`SELECT count(*) FROM penstock.entry_webhook WHERE attempt = 1 AND history->0->>'class' = 'secret'`); n != 1 || len(d.ids) != 0 {
			t.Errorf("%d callbacks wait, %d were sent", n, len(d.ids))
		}
	}
	d.handler.vault = home
	d.must(d.deliver())
}

// The first attempt was made while the database's clock was a year ahead: the message waited for a year and three days.
func TestUnracedACallbackThatWasTriedInTimeToComeEnds(t *testing.T) {
	d := newFixture(t, atHome)
	d.handler.vault = Vault{}
	d.finishWork(d.receiver.URL)
	_ = d.deliver()
	_, err := d.pool.Exec(d.ctx, `
	    UPDATE penstock.entry_webhook
	       SET created_at = created_at - interval '100 hours',
	           history = jsonb_set(history, '{0,at}', to_jsonb((history->0->>'at')::timestamptz + interval '1 year'))`)
	d.must(err)
	_ = d.deliver()
	if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'secret'`); n != 1 {
		t.Errorf("%d callbacks have failed, want the one that is 100 hours old", n)
	}
}

// A secret that nobody can read any more keeps its messages for as long as a receiver that is down, and so does the secret
// of a client. One that was accepted long ago, and was never tried, has the whole time.
func TestUnracedACallbackWhoseSecretCannotBeReadEnds(t *testing.T) {
	for name, age := range map[string]string{"new": "0h", "old": "200h"} {
		t.Run(name, func(t *testing.T) {
			d := newFixture(t, atHome)
			_, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL) // makes the root secret
			d.must(err)
			d.handler.vault = NewVault("another key for tests alone", nil)
			d.finishWork(d.receiver.URL)
			d.older(age)
			for _, hours := range []string{"0h", "90h"} {
				d.older(hours)
				_ = d.deliver()
				if n := d.count(`SELECT count(*) FROM penstock.entry_webhook WHERE attempt = 1`); n != 1 {
					t.Fatalf("%d callbacks wait after another %s", n, hours)
				}
			}
			d.older("1h")
			_ = d.deliver()
			if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'secret'`); n != 1 {
				t.Fatalf("%d failures of class secret after 91 hours, want 1", n)
			}
			_, err = d.pool.Exec(d.ctx, `SELECT penstock.retry_failure(entry_id, 'the key is back', 'test') FROM penstock.failure`)
			d.must(err)
			_ = d.deliver()
			d.handler.vault = home
			d.must(d.deliver())
		})
	}
}

// The database is to blame for no message: none waits longer, uses up an attempt or ends, however old it is.
func TestAnErrorOfTheDatabaseUsesUpNothing(t *testing.T) {
	d := newFixture(t, atHome, 500)
	d.finishWork(d.receiver.URL)
	_ = d.deliver()
	d.older("200h")
	for _, sql := range []string{
		`ALTER TABLE penstock.webhook_endpoint RENAME TO hidden`,
		`DELETE FROM penstock.throttle`, // of the read before
	} {
		_, err := d.pool.Exec(d.ctx, sql)
		d.must(err)
		if err := d.deliver(); postgres.Code(err) != "42P01" {
			t.Fatalf("read without a table: %v", err)
		}
		if n := d.count(`SELECT count(*) FROM penstock.entry_webhook WHERE attempt = 1 AND status = 'pending'
		                 AND jsonb_array_length(history) = 1`); n != 1 {
			t.Fatalf("%d callbacks are as they were, want 1", n)
		}
	}
	if left := d.count(`SELECT ceil(extract(epoch FROM max(until) - clock_timestamp()))::int FROM penstock.throttle`); left > 1 {
		t.Errorf("the queue waits for %d s", left)
	}
}

// For what is no address no secret can be derived, which is no error of the database.
func TestWhatIsNoAddressIsRefused(t *testing.T) {
	d := newFixture(t, atHome)
	d.finishWork("https://a.example/%zz")
	_, err := d.pool.Exec(d.ctx, `UPDATE penstock.ready SET flow = $1`, d.receiver.Listener.Addr().String())
	d.must(err)
	_ = d.deliver()
	if n := d.count(`SELECT count(*) FROM penstock.failure WHERE class = 'refused'`); n != 1 {
		t.Error("the callback is not a failure")
	}
}

func TestTheWaitForASecretGrows(t *testing.T) {
	for tried, want := range map[time.Duration]time.Duration{
		0: 10 * time.Second, time.Minute: 10 * time.Second, time.Hour: 3 * time.Minute, 24 * time.Hour: 10 * time.Minute,
	} {
		if got := secretWait(tried); got != want {
			t.Errorf("after %s the next wait is %s, want %s", tried, got, want)
		}
	}
}

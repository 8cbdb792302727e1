package browser

import (
	"context"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/penstock/penstock/pkg/operator"
)

// A second click on the button of a change, before its answer has come, sends nothing: in the dialog, and on the page of
// its own that the form has after an error and without script for dialogs.
func TestAChangeIsSentOnce(t *testing.T) {
	s := newStage(t, true)
	for _, path := range []string{"queues/reports", "do/pause_queue?name=reports&next=queues/reports"} {
		tab := s.open()
		tab.visit(path)
		if !strings.HasPrefix(path, "do/") {
			tab.click("a[data-dialog]", "Pause")
		}
		tab.until(`document.querySelector('form.verb input[name=reason]') === document.activeElement`)
		tab.do(chromedp.KeyEvent("once"))
		sent := eval[string](tab, `(() => { let sent = 0; addEventListener('submit', e => sent += !e.defaultPrevented);
			const b = document.querySelector('form.verb button'); b.click(); b.click(); return sent + ' ' + getComputedStyle(b.form).opacity; })()`)
		if sent != "1 0.45" {
			t.Errorf("two clicks in the form of %s: changes sent and opacity are %s, want 1 0.45", path, sent)
		}
		tab.reads("Queue reports is paused.")
		s.exec(`SELECT penstock.resume_queue('reports')`)
	}
}

// ahead is a machine of a visitor whose clock is an hour ahead.
const ahead = `(() => { const now = Date.now; Date.now = () => now() + 3_600_000; })()`

// Ages do not depend on the clock of the visitor's machine: not at first, and not when the page counts on by itself.
func TestAgesAreByTheClockOfTheLeader(t *testing.T) {
	s := newStage(t, true)
	tab := s.open()
	tab.do(chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(ahead).Do(ctx)
		return err
	}))
	s.exec(`INSERT INTO penstock.audit (actor, verb, object, reason) VALUES ('ada', 'pause_queue', 'reports', 'an age')`)
	for _, path := range []string{"audit", "tokens"} { // the second has no stream
		tab.visit(path)
		tab.until(`document.querySelector('time[data-rel]') !== null && (!document.querySelector('#stream') || document.querySelector('#stream').dataset.state === 'live')`)
		newest := `[...document.querySelectorAll('#live time[data-rel=ago]')].map(t => t.textContent)`
		if path == "audit" {
			newest += `.slice(0, 1)`
		}
		eval[bool](tab, `(window.begun = performance.now(), true)`)
		tab.until(`performance.now() - window.begun > 1500`) // ages are written each second
		for _, age := range eval[[]string](tab, newest) {
			if strings.Contains(age, "h") {
				t.Errorf("%s: with a clock that is an hour ahead an age is %q", path, age)
			}
		}
	}
}

// The stream of a page was lost, or paused, before its session ended: the state names the end.
func TestTheEndOfASessionIsNamedAfterALostStream(t *testing.T) {
	s := newStage(t, false)
	tab := s.open()
	tab.tolerated = "401 (Unauthorized)"
	tab.visit("queues/reports")
	tab.do(chromedp.WaitVisible(`input[name=token]`), chromedp.SendKeys(`input[name=token]`, s.secret+kb.Enter))
	tab.until(streamState + ` === 'live'`)
	tab.click("a[data-dialog]", "Pause")
	tab.until(`document.querySelector('dialog[open]') !== null`)
	eval[bool](tab, `(document.querySelector('#pause').click(), true)`)
	s.must(s.change.RevokeToken(t.Context(), "ada", tester))
	eval[bool](tab, `(document.querySelector('#pause').click(), true)`)
	tab.until(`document.querySelector('#stream').textContent === 'session ended'`)
}

// A token is revoked while a dialog is open: what was typed stays, and is in the form again after the login.
func TestADialogOutlivesItsSession(t *testing.T) {
	s := newStage(t, false)
	tab := s.open()
	tab.tolerated = "401 (Unauthorized)" // the answer to the form
	tab.visit("queues/reports")
	tab.do(chromedp.WaitVisible(`input[name=token]`), chromedp.SendKeys(`input[name=token]`, s.secret+kb.Enter))
	tab.until(streamState + ` === 'live'`)
	tab.click("a[data-dialog]", "Pause")
	tab.until(`document.querySelector('dialog[open] input[name=reason]') === document.activeElement`)
	tab.do(chromedp.KeyEvent("a long story"))
	s.must(s.change.RevokeToken(t.Context(), "ada", tester))
	tab.until(`document.querySelector('#stream')?.textContent === 'session ended' || location.pathname.endsWith('/login')`)
	if typed := eval[string](tab, `document.querySelector('dialog[open] input[name=reason]')?.value ?? ''`); typed != "a long story" {
		t.Fatalf("after the end of the session the dialog has %q", typed)
	}
	tab.do(chromedp.KeyEvent(kb.Enter))
	tab.reads("nothing was changed")
	other, err := s.change.CreateToken(t.Context(), operator.Grant{Name: "ben", Scopes: []string{"operate"}}, tester)
	s.must(err)
	tab.click("a.button", "Log in again")
	tab.do(chromedp.WaitVisible(`input[name=token]`), chromedp.SendKeys(`input[name=token]`, other+kb.Enter))
	tab.until(`document.querySelector('form.verb input[name=reason]')?.value === 'a long story'`)
	tab.do(chromedp.Click(`form.verb button`))
	tab.reads("Queue reports is paused.")
}

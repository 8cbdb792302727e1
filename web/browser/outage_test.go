package browser

import (
	"testing"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
)

// The database is stopped under an open page, for longer than a stream goes without a check of its session: the page
// says so, keeps what it has, is not sent to the login, and goes on by itself when the database is back.
func TestAPageOutlivesItsDatabase(t *testing.T) {
	if chromium() == "" {
		machine.Lacks(t, "chromium", "apt-get install chromium-headless-shell")
	}
	own := pgtest.Server(t)
	s := newStageOn(t, own.DSN(), false)
	s.seed()
	tab := s.open()
	tab.visit("queues")
	tab.do(chromedp.WaitVisible(`input[name=token]`), chromedp.SendKeys(`input[name=token]`, tab.secret+kb.Enter))
	tab.reads("embeddings")
	tab.until(`document.querySelector('#stream')?.dataset.state === 'live'`)
	eval[bool](tab, `(window.marked = true)`)

	own.Stop(devpostgres.Fast)
	tab.reads("The database does not answer.")
	tab.until(`/as of (1[3-9]|[2-9]\d) s|as of \d+ min/.test(document.querySelector('.banner.bad')?.textContent ?? '')`)
	if !eval[bool](tab, `window.marked === true && document.body.innerText.includes('embeddings')`) {
		t.Error("the page did not keep what it had")
	}
	// Another page, which was not displayed before, says it too.
	other := tab.second()
	other.tolerated = "503 (Service Unavailable)" // that is the answer, with a page
	other.visit("fairness")
	other.reads("The database does not answer.")

	own.Start()
	other.reads("Jain index")
	tab.do(page.BringToFront()) // a hidden page has no stream
	tab.until(`!document.body.innerText.includes('The database does not answer.')`)
	tab.until(`window.marked === true && document.querySelector('#stream').dataset.state === 'live'`)
	s.exec(`SELECT penstock.create_queue('afterwards')`)
	tab.reads("afterwards")
}

package browser

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web"
)

// stage is a dashboard on a seeded database, and a browser that has its pages open.
type stage struct {
	*testing.T
	pool   *pgxpool.Pool
	change *operator.Database
	server *httptest.Server
	secret string // of a token with scope admin
}

var tester = invalidation.By{Actor: "tester", Reason: "fixture"}

// patience bounds each wait for an event in the browser. It says nothing about speed: the machine may be busy.
const patience = 90 * time.Second

// newStage serves the dashboard on seeded data; open without a login.
func newStage(t *testing.T, open bool) *stage {
	t.Helper()
	if chromium() == "" {
		machine.Lacks(t, "chromium", "apt-get install chromium-headless-shell")
	}
	dsn := pgtest.Prepared(t, "seeded", func(_ context.Context, pool *pgxpool.Pool) error {
		s := &stage{T: t, pool: pool, change: operator.New(pool)}
		s.seed()
		return nil
	})
	s := newStageOn(t, dsn, open)
	s.age()
	return s
}

// newStageOn serves the dashboard on a database of the caller, without data.
func newStageOn(t *testing.T, dsn string, open bool) *stage {
	t.Helper()
	s := &stage{T: t, pool: connect(t, postgres.Config{DSN: dsn, MaxConns: 8})}
	s.change = operator.New(s.pool)
	read := connect(t, postgres.Config{DSN: dsn, MaxConns: 4, StatementTimeout: time.Minute, ReadOnly: true})
	pages, err := web.New(operator.New(read), s.change, web.Config{
		Open: open, Token: s.living, Timetable: everyTwoHours, TraceURL: "https://tempo.example/trace/{trace}",
		Examine: s.examine,
	})
	s.must(err)
	s.secret, err = s.change.CreateToken(t.Context(), operator.Grant{Name: "ada", Scopes: []string{"admin"}}, tester)
	s.must(err)
	s.server = httptest.NewServer(pages)
	t.Cleanup(s.server.Close)
	t.Cleanup(pages.Drain)
	return s
}

// chromium is the path of a browser, or "". The headless shell is chromium without the windows of its own user
// interface, which the full browser renders for each page even when it has no screen: a run takes half of the time.
func chromium() string {
	for _, name := range []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

func everyTwoHours(j operator.CronSchedule, from, to time.Time, _ int) (fires []time.Time, words string, err error) {
	step := 2 * time.Hour
	if strings.HasPrefix(j.Name, "probe") {
		step = 5 * time.Minute
	}
	for at := from.Truncate(step).Add(step); at.Before(to); at = at.Add(step) {
		fires = append(fires, at)
	}
	return fires, "every " + step.String(), nil
}

func connect(t *testing.T, cfg postgres.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func (s *stage) living(ctx context.Context, secret string) (operator.APIToken, error) {
	token, err := s.change.FindToken(ctx, secret)
	if err == nil && !token.Live {
		err = invalidation.ErrNotFound
	}
	return token, err
}

// examine is the doctor without the finding about the server of tests, which does not flush to disk.
func (s *stage) examine(ctx context.Context) ([]doctor.Finding, error) {
	found, err := doctor.Examine(ctx, s.pool, doctor.Config{})
	return slices.DeleteFunc(found, func(f doctor.Finding) bool { return f.Check == "durability" }), err
}

func (s *stage) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *stage) exec(sql string, args ...any) {
	s.Helper()
	if _, err := s.pool.Exec(s.Context(), sql, args...); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
}

// tab is a tab of a browser. Errors of its console and violations of the content policy fail the test.
type tab struct {
	*stage
	ctx    context.Context
	window cdp.BrowserContextID

	tolerated string // text of a fault that a test expects

	mu     sync.Mutex
	faults []string
}

// browser is that of all tests, which the first one starts: starting it takes as long as a test. Each test has a context of
// its own in it, as a window without the cookies and the cache of others.
var browser context.Context

func TestMain(m *testing.M) {
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(chromium()), chromedp.NoSandbox, chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.WSURLReadTimeout(patience))
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, closeBrowser := chromedp.NewContext(allocator, chromedp.WithErrorf(func(string, ...any) {})) // it logs events that it does not know
	browser = ctx
	status := m.Run()
	closeBrowser()
	end()
	os.Exit(status)
}

// open opens a window with one tab.
func (s *stage) open() *tab {
	s.Helper()
	s.must(chromedp.Run(browser))
	program := cdp.WithExecutor(browser, chromedp.FromContext(browser).Browser)
	window, err := target.CreateBrowserContext().Do(program)
	s.must(err)
	s.Cleanup(func() { _ = target.DisposeBrowserContext(window).Do(program) })
	first, err := target.CreateTarget("about:blank").WithBrowserContextID(window).WithNewWindow(true).Do(program)
	s.must(err)
	ctx, closeTab := chromedp.NewContext(browser, chromedp.WithTargetID(first))
	s.Cleanup(closeTab)
	return s.watch(ctx, window)
}

// second opens another tab of the same window.
func (t *tab) second() *tab {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(browser, chromedp.WithExistingBrowserContext(t.window))
	t.Cleanup(closeTab)
	return t.watch(ctx, t.window)
}

func (s *stage) watch(ctx context.Context, window cdp.BrowserContextID) *tab {
	s.Helper()
	t := &tab{stage: s, ctx: ctx, window: window}
	chromedp.ListenTarget(ctx, t.hear)
	t.do(log.Enable(), runtime.Enable(), page.Enable(), chromedp.EmulateViewport(1360, 900))
	s.Cleanup(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		for _, fault := range t.faults {
			s.Errorf("the browser reports: %s", fault)
		}
	})
	return t
}

func (t *tab) hear(event any) {
	fault := ""
	switch e := event.(type) {
	case *log.EventEntryAdded:
		if e.Entry.Level == log.LevelError || e.Entry.Source == log.SourceSecurity {
			fault = fmt.Sprintf("%s: %s (%s)", e.Entry.Source, e.Entry.Text, e.Entry.URL)
		}
	case *runtime.EventExceptionThrown:
		fault = "exception: " + e.ExceptionDetails.Error()
	case *page.EventJavascriptDialogOpening:
		fault = "a text of a user ran as script: " + e.Message
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning {
			fault = "console." + string(e.Type)
			for _, argument := range e.Args {
				fault += fmt.Sprintf(" %s%s", argument.Value, argument.Description)
			}
		}
	}
	if fault != "" && (t.tolerated == "" || !strings.Contains(fault, t.tolerated)) {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.faults = append(t.faults, fault)
	}
}

// do carries out actions in the tab.
func (t *tab) do(actions ...chromedp.Action) {
	t.Helper()
	if err := t.try(actions...); err != nil {
		t.Fatal(err)
	}
}

// try is do with the error as its result. The first call of a tab must not have a deadline of its own: its context is
// that of the browser.
func (t *tab) try(actions ...chromedp.Action) error {
	ended := make(chan error, 1)
	go func() { ended <- chromedp.Run(t.ctx, actions...) }()
	select {
	case err := <-ended:
		return err
	case <-time.After(patience):
		return fmt.Errorf("the browser did not do it within %s: %w", patience, errors.ErrUnsupported)
	}
}

// visit opens a page below the dashboard.
func (t *tab) visit(path string) {
	t.Helper()
	t.do(chromedp.Navigate(t.server.URL+"/ui/"+path), chromedp.WaitReady("body"))
}

// eval returns the value of an expression on the page.
func eval[T any](t *tab, expression string) T {
	t.Helper()
	var value T
	if err := t.try(chromedp.Evaluate(expression, &value)); err != nil {
		t.Fatalf("evaluate %s: %v", expression, err)
	}
	return value
}

// until waits until an expression on the page is true. A page that is being left or loaded answers no expression: the
// next one is asked.
func (t *tab) until(expression string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		var holds bool
		err := t.try(chromedp.Evaluate(`!!(`+expression+`)`, &holds))
		if err == nil && holds {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("wait until %s: %v; the page has: %.2000s", expression, err, eval[string](t, `document.body?.innerText ?? ''`))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// reads waits until the page has a text.
func (t *tab) reads(text string) {
	t.Helper()
	t.until(fmt.Sprintf(`document.body?.innerText.includes(%q)`, text))
}

// click clicks the first element of a selector that has a text.
func (t *tab) click(selector, text string) {
	t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll(%q)].find(e => e.textContent.includes(%q))`, selector, text)
	t.until(`!!` + find)
	eval[bool](t, `(`+find+`.click(), true)`)
}

// narrow gives the tab the size of a small telephone.
func (t *tab) narrow() {
	t.Helper()
	t.do(emulation.SetDeviceMetricsOverride(360, 740, 2, true))
}

// scheme sets the preferred colours of the system.
func (t *tab) scheme(name string) {
	t.Helper()
	t.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}))
}

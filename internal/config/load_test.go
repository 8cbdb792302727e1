package config_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/config"
)

type settings struct {
	Database config.Database `koanf:"database"`
	Leader   section         `koanf:"leader"`
}

type section struct {
	Listen string        `koanf:"listen" help:"address to listen on"`
	Pause  time.Duration `koanf:"pause" help:"between two looks"`
	Names  []string      `koanf:"some_names" help:"several of them"`
	Share  float64       `koanf:"share" help:"of something"`
	Off    bool          `koanf:"off" help:"not on"`
}

func defaults() settings {
	return settings{Database: config.DatabaseDefault(), Leader: section{Listen: ":1", Pause: time.Second, Names: []string{"a"}}}
}

// load reads a configuration from text of a file, environment and flags.
func load(t *testing.T, file string, environ []string, args ...string) (settings, error) {
	t.Helper()
	if file != "" {
		path := filepath.Join(t.TempDir(), "penstock.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config", path}, args...)
	}
	if environ == nil {
		environ = []string{}
	}
	s := defaults()
	err := config.Load(config.Program{Name: "leader", Args: args, Environ: environ}, &s)
	return s, err
}

func TestADatabaseWithoutAnAddressIsRefused(t *testing.T) {
	none := func(string) string { return "" }
	if err := (config.Database{}).Given(none); err == nil || !strings.Contains(err.Error(), "--database-url") {
		t.Errorf("no address: %v, want it named", err)
	}
	if err := (config.Database{URL: "postgres://h/d"}).Given(none); err != nil {
		t.Errorf("an address: %v", err)
	}
	socket := func(name string) string { return map[string]string{"PGHOST": "/run/postgresql"}[name] }
	if err := (config.Database{}).Given(socket); err != nil {
		t.Errorf("PGHOST: %v", err)
	}
}

func TestLaterSourceWins(t *testing.T) {
	file := "leader: {listen: ':2', pause: 2s, some_names: [b, c], share: 0.5}\ndatabase: {max_conns: 2}\n"
	env := []string{"PENSTOCK_LEADER_LISTEN=:3", "PENSTOCK_LEADER_PAUSE=3s", "PENSTOCK_LEADER_OFF=true"}
	for _, c := range []struct {
		file string
		env  []string
		args []string
		want section
	}{
		{want: defaults().Leader},
		{file: file, want: section{":2", 2 * time.Second, []string{"b", "c"}, 0.5, false}},
		{file: file, env: env, want: section{":3", 3 * time.Second, []string{"b", "c"}, 0.5, true}},
		{
			file: file, env: env, args: []string{"--listen", ":4", "--some-names=d,e", "--share=0.25"},
			want: section{":4", 3 * time.Second, []string{"d", "e"}, 0.25, true},
		},
		{file: "leader: {some_names: []}", want: section{":1", time.Second, []string{}, 0, false}},
		{file: file, args: []string{"--some-names="}, want: section{":2", 2 * time.Second, []string{}, 0.5, false}},
		{env: []string{"PENSTOCK_LEADER_SOME_NAMES=f,g"}, want: section{":1", time.Second, []string{"f", "g"}, 0, false}},
	} {
		got, err := load(t, c.file, c.env, c.args...)
		if err != nil || !reflect.DeepEqual(got.Leader, c.want) {
			t.Errorf("file %q, environment %v, flags %v: %+v (%v), want %+v", c.file, c.env, c.args, got.Leader, err, c.want)
		}
	}
}

func TestUnknownKeyIsAnErrorThatNamesIt(t *testing.T) {
	for _, c := range []struct {
		name, file, env, arg, want string
	}{
		{name: "flag", arg: "--lisen=:1", want: "lisen"},
		{name: "argument", arg: "start", want: `"start"`},
		{name: "environment", env: "PENSTOCK_LEADER_LISEN=:1", want: "PENSTOCK_LEADER_LISEN"},
		{name: "section in the environment", env: "PENSTOCK_LEDER_LISTEN=:1", want: "PENSTOCK_LEDER_LISTEN"},
		{name: "file", file: "leader: {lisen: ':1'}", want: "leader.lisen"},
		{name: "section in the file", file: "leder: {listen: ':1'}", want: "leder.listen"},
		{name: "duration without a unit", file: "leader: {pause: 10}", want: "10s"},
		{name: "no duration", env: "PENSTOCK_LEADER_PAUSE=soon", want: `PENSTOCK_LEADER_PAUSE: time: invalid duration "soon"`},
		{name: "file that is not there", env: "PENSTOCK_CONFIG=/nowhere/penstock.yaml", want: "/nowhere/penstock.yaml"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var args, env []string
			if c.arg != "" {
				args = []string{c.arg}
			}
			if c.env != "" {
				env = []string{c.env}
			}
			_, err := load(t, c.file, env, args...)
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error is %v, want one that says %s", err, c.want)
			}
		})
	}
}

func TestOneFileAndEnvironmentServeAllPrograms(t *testing.T) {
	got, err := load(t, "tasknode: {threads: 4}\nleader: {listen: ':2'}", []string{
		"PENSTOCK_TASKNODE_THREADS=4", "PENSTOCK_ALLOW_DOWNLOAD=1",
		// A Kubernetes service named penstock-leader.
		"PENSTOCK_LEADER_SERVICE_HOST=10.0.0.1", "PENSTOCK_LEADER_PORT=tcp://10.0.0.1:80", "PENSTOCK_LEADER_PORT_80_TCP_ADDR=10.0.0.1",
		"PENSTOCK_SERVICE_PORT_HTTP=80",
		// What the CLI reads, which starts programs as well.
		"PENSTOCK_SERVER=http://x", "PENSTOCK_TOKEN=pst_x", "PENSTOCK_CA_FILE=x", "PENSTOCK_CERT_FILE=x", "PENSTOCK_KEY_FILE=x",
	})
	if err != nil || got.Leader.Listen != ":2" {
		t.Errorf("listen is %q (%v)", got.Leader.Listen, err)
	}
}

func TestHelpShowsEachOptionWithItsDefault(t *testing.T) {
	var out bytes.Buffer
	s := defaults()
	err := config.Load(config.Program{Name: "leader", Summary: "It leads.", Args: []string{"--help"}, Out: &out}, &s)
	if !errors.Is(err, config.ErrHelp) {
		t.Fatalf("error is %v, want ErrHelp", err)
	}
	for _, want := range []string{"It leads.", "--listen", "--database-url", "between two looks (default 1s)", "PENSTOCK_DATABASE_URL"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("help does not say %q:\n%s", want, out.String())
		}
	}
}

func TestLogOptionsAreChecked(t *testing.T) {
	if _, err := config.LogDefault().Logger(&bytes.Buffer{}); err != nil {
		t.Errorf("defaults: %v", err)
	}
	for _, l := range []config.Log{{Level: "loud", Format: "text"}, {Level: "info", Format: "xml"}} {
		if _, err := l.Logger(&bytes.Buffer{}); err == nil {
			t.Errorf("%+v is taken", l)
		}
	}
}

// An empty variable is one that a template did not fill: it changes nothing, whatever the type of its option.
func TestAnEmptyValueIsNotGiven(t *testing.T) {
	base := defaults()
	base.Leader.Off, base.Leader.Share = true, 0.5
	for _, o := range config.Options("leader", &base) {
		for _, source := range []string{"environment", "file", "null in the file"} {
			got := base
			p := config.Program{Name: "leader", Environ: []string{o.Env + "="}}
			if source != "environment" {
				path := filepath.Join(t.TempDir(), "penstock.yaml")
				section, key, _ := strings.Cut(o.Key, ".")
				text := section + ": {" + key + ": ''}"
				if source != "file" {
					text = section + ":\n  " + key + ":\n"
				}
				if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
				p = config.Program{Name: "leader", Args: []string{"--config", path}, Environ: []string{}}
			}
			if err := config.Load(p, &got); err != nil || !reflect.DeepEqual(got, base) {
				t.Errorf("%s empty in the %s: %+v (%v)", o.Key, source, got, err)
			}
		}
	}
}

// A section stays in the file when its last option is commented out.
func TestAnEmptySectionIsNotGiven(t *testing.T) {
	for _, file := range []string{"leader:\n", "leader: {}", "database:\n  # url: postgres://h/d\n", "tasknode:\ngateway: {}"} {
		if got, err := load(t, file, nil); err != nil || !reflect.DeepEqual(got, defaults()) {
			t.Errorf("%q: %+v (%v)", file, got, err)
		}
	}
	for _, file := range []string{"leder:\n", "leader: 5", "tasknode: x", "leader: []"} {
		if got, err := load(t, file, nil); err == nil {
			t.Errorf("%q is taken: %+v", file, got)
		}
	}
}

func TestAValueOfTheFileIsReadAsThatOfAFlag(t *testing.T) {
	for text, want := range map[string]func(settings) bool{
		"leader: {some_names: 'a,b'}":       func(s settings) bool { return reflect.DeepEqual(s.Leader.Names, []string{"a", "b"}) },
		"leader: {some_names: [' a', 7]}":   func(s settings) bool { return reflect.DeepEqual(s.Leader.Names, []string{"a", "7"}) },
		"leader: {some_names: []}":          func(s settings) bool { return len(s.Leader.Names) == 0 },
		"database: {max_conns: 20000000.0}": func(s settings) bool { return s.Database.MaxConns == 20_000_000 },
		"database: {max_conns: '7'}":        func(s settings) bool { return s.Database.MaxConns == 7 },
		"leader: {off: 'true', share: 1}":   func(s settings) bool { return s.Leader.Off && s.Leader.Share == 1 },
	} {
		if got, err := load(t, text, nil); err != nil || !want(got) {
			t.Errorf("%s: %+v (%v)", text, got, err)
		}
	}
	for _, text := range []string{
		"database: {max_conns: 2.9}", "database: {max_conns: true}", "database: {max_conns: [1]}", "leader: {off: 3}",
		"leader: {share: much}", "leader: {pause: 5}",
	} {
		key := strings.NewReplacer(": {", ".").Replace(text[:strings.LastIndex(text, ":")])
		if got, err := load(t, text, nil); err == nil || !strings.Contains(err.Error(), key+": ") {
			t.Errorf("%s is taken: %+v (%v)", text, got, err)
		}
	}
	if got, err := load(t, "", []string{"PENSTOCK_LEADER_SOME_NAMES=a, b,"}); err != nil || !reflect.DeepEqual(got.Leader.Names, []string{"a", "b"}) {
		t.Errorf("a list with blanks: %q (%v)", got.Leader.Names, err)
	}
	if err := (config.Database{URL: "postgres://h/d", Timeout: -time.Second}).Given(func(string) string { return "" }); err == nil {
		t.Error("a negative timeout of the database is taken")
	}
}

func TestOptionsOfAnEmbeddedSectionAreThoseOfTheSectionAroundIt(t *testing.T) {
	var s struct {
		Leader struct {
			Key              string `koanf:"key"`
			config.Addresses `koanf:",squash"`
		} `koanf:"leader"`
	}
	err := config.Load(config.Program{Name: "leader", Args: []string{"--ports", "8443"}, Environ: []string{"PENSTOCK_LEADER_ALLOW_HTTP=true"}}, &s)
	if l := s.Leader; err != nil || !l.AllowHTTP || len(l.Ports) != 1 || l.Ports[0] != "8443" {
		t.Errorf("read %+v (%v)", l, err)
	}
}

package config

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/providers/posflag"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

const envPrefix = "PENSTOCK_"

// programs are the programs whose sections may share one file and one environment.
var programs = []string{"leader", "tasknode", "gateway"}

// notOptions are variables that other parts of Penstock read, the CLI above all.
var notOptions = []string{
	"PENSTOCK_CONFIG", "PENSTOCK_ALLOW_DOWNLOAD", "PENSTOCK_TEST_DATABASE_URL",
	"PENSTOCK_SERVER", "PENSTOCK_TOKEN", "PENSTOCK_CA_FILE", "PENSTOCK_CERT_FILE", "PENSTOCK_KEY_FILE",
}

// secretPrefix begins the names of secrets to which settings refer. Their names are the user's.
const secretPrefix = envPrefix + "SECRET_"

// linked matches variables that Kubernetes and Docker set for a service whose name begins with
// penstock.
var linked = regexp.MustCompile(
	`^PENSTOCK_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_.*)?|NAME|ENV_.*)$`)

// ErrHelp is returned after the help was printed on request.
var ErrHelp = errors.New("help was printed")

// Program is the program that reads the configuration, and its sources.
type Program struct {
	Name    string // its section
	Summary string // printed above the options by --help
	Args    []string
	Environ []string  // nil: os.Environ
	Out     io.Writer // of --help
}

// Main is the main function of a daemon: it reads cfg (see Load) from the command line and its
// environment, and runs. The context of run ends with the first SIGINT or SIGTERM; the second one
// ends the process. The exit code is 2 for an invalid configuration, and 1 if run ended with an
// error.
func Main(
	p Program, cfg any, section *Log, validate func() error, run func(context.Context, *slog.Logger) error,
) {
	p.Args, p.Out = os.Args[1:], os.Stdout
	err := Load(p, cfg)
	if errors.Is(err, ErrHelp) {
		return
	}
	if err == nil {
		err = validate()
	}
	var log *slog.Logger
	if err == nil {
		log, err = section.Logger(os.Stderr)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", p.Name, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	err = run(ctx, log)
	stop()
	if err != nil {
		log.Error("program ended", "program", p.Name, "error", err)
		os.Exit(1)
	}
}

// Load fills cfg, a pointer to a struct that holds the defaults.
func Load(p Program, cfg any) error {
	all := Options(p.Name, cfg)
	flags, err := p.flags(all)
	if err != nil {
		return err
	}
	if err := flags.Parse(p.Args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return ErrHelp
		}
		return fmt.Errorf("read flags: %w", err)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("read flags: %q is not a flag; %s takes no other arguments", flags.Arg(0), p.Name)
	}
	k := koanf.New(".")
	if err := p.readFile(k, flags, all); err != nil {
		return err
	}
	if err := p.readEnv(k, all); err != nil {
		return err
	}
	// Only flags that were given count: cfg has the defaults already.
	keys := map[string]string{}
	for _, o := range all {
		keys[o.Flag] = o.Key
	}
	given := posflag.ProviderWithFlag(flags, ".", nil, func(f *pflag.Flag) (string, any) {
		return keys[f.Name], posflag.FlagVal(flags, f)
	})
	if err := k.Load(given, nil); err != nil {
		return fmt.Errorf("read flags: %w", err)
	}
	if err := k.Unmarshal("", cfg); err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	return nil
}

func (p Program) flags(all []Option) (*pflag.FlagSet, error) {
	flags := pflag.NewFlagSet(p.Name, pflag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.SortFlags = false
	flags.String("config", "", "file to read, YAML (also PENSTOCK_CONFIG)")
	for _, o := range all {
		if err := o.addTo(flags); err != nil {
			return nil, err
		}
	}
	flags.Usage = func() {
		fmt.Fprintf(p.Out, "%s\n\nOptions:\n%s\n", strings.TrimSpace(p.Summary), flags.FlagUsagesWrapped(110))
		fmt.Fprintf(p.Out, "Each option can stand in the environment (--%s is %s) and in the file (%s).\n",
			all[0].Flag, all[0].Env, all[0].Key)
		fmt.Fprintln(p.Out, "Flags win over the environment, the environment over the file. All of it: "+
			"docs/configuration.md.")
	}
	return flags, nil
}

// readFile loads the file that --config or PENSTOCK_CONFIG names, if any.
func (p Program) readFile(k *koanf.Koanf, flags *pflag.FlagSet, all []Option) error {
	path, err := flags.GetString("config")
	if err != nil {
		return err
	}
	path = cmp.Or(path, p.lookup("PENSTOCK_CONFIG"))
	if path == "" {
		return nil
	}
	read := koanf.New(".")
	if err := read.Load(file.Provider(path), yaml.Parser()); err != nil {
		return fmt.Errorf("read configuration file %s: %w", path, err)
	}
	values := map[string]any{}
	for key, value := range read.All() {
		i := slices.IndexFunc(all, func(o Option) bool { return o.Key == key })
		switch {
		case i >= 0:
			parsed, given, err := all[i].parseYAML(value)
			if err != nil {
				return fmt.Errorf("read configuration file %s: %s: %w", path, key, err)
			}
			if given {
				values[key] = parsed
			}
		case isEmpty(value) && isSection(key, all): // all of its options are commented out
		case !p.belongsElsewhere(key, "."):
			return fmt.Errorf("read configuration file %s: key %q does not exist; docs/configuration.md lists all",
				path, key)
		}
	}
	return k.Load(confmap.Provider(values, "."), nil)
}

// isEmpty reports whether a value of the file has nothing in it.
func isEmpty(value any) bool {
	options, isMap := value.(map[string]any)
	return value == nil || isMap && len(options) == 0
}

// isSection reports whether a key is a section with one of the options, or that of another program.
func isSection(key string, all []Option) bool {
	return slices.Contains(programs, key) ||
		slices.ContainsFunc(all, func(o Option) bool { return strings.HasPrefix(o.Key, key+".") })
}

// readEnv loads the options that the environment sets.
func (p Program) readEnv(k *koanf.Koanf, all []Option) error {
	var unknown []string
	var flaw error
	err := k.Load(env.Provider(".", env.Opt{
		Prefix:      envPrefix,
		EnvironFunc: p.environ,
		TransformFunc: func(name, value string) (string, any) {
			i := slices.IndexFunc(all, func(o Option) bool { return o.Env == name })
			switch {
			case i >= 0 && strings.TrimSpace(value) == "": // not given
			case i >= 0:
				parsed, err := all[i].parse(value)
				if err != nil {
					flaw = fmt.Errorf("%s: %w", name, err)
				}
				return all[i].Key, parsed
			case !slices.Contains(notOptions, name) && !strings.HasPrefix(name, secretPrefix) &&
				!linked.MatchString(name) && !p.belongsElsewhere(strings.ToLower(strings.TrimPrefix(name, envPrefix)),
				"_"):
				unknown = append(unknown, name)
			}
			return "", nil
		},
	}), nil)
	if err = cmp.Or(err, flaw); err != nil {
		return fmt.Errorf("read environment: %w", err)
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return fmt.Errorf("read environment: %s does not exist; docs/configuration.md lists all",
			strings.Join(unknown, ", "))
	}
	return nil
}

// belongsElsewhere reports whether a key is in the section of another program.
func (p Program) belongsElsewhere(key, separator string) bool {
	return slices.ContainsFunc(programs, func(other string) bool {
		return other != p.Name && strings.HasPrefix(key, other+separator)
	})
}

func (p Program) environ() []string {
	if p.Environ != nil {
		return p.Environ
	}
	return os.Environ()
}

func (p Program) lookup(name string) string {
	for _, pair := range p.environ() {
		if value, found := strings.CutPrefix(pair, name+"="); found {
			return value
		}
	}
	return ""
}

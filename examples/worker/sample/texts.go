package sample

// Text is a short text and the language it is written in (ISO 639-1).
type Text struct {
	Language string
	Text     string
}

// Texts are a few everyday sentences in twelve languages.
func Texts() []Text {
	return []Text{
		{"en", "The water rose overnight, so the keeper opened the second gate before breakfast."},
		{"fr", "Bonjour à tous, le barrage sera ouvert au public dès samedi matin."},
		{"de", "Guten Morgen, die Turbine läuft wieder und das Wasser fließt ruhig durch das Rohr."},
		{"es", "Buenos días, la compuerta se cerró anoche porque el río llevaba demasiada agua."},
		{"it", "Buongiorno, oggi la centrale produce molta più energia della settimana scorsa."},
		{"pt", "Bom dia, a equipe não conseguiu terminar a inspeção da tubulação ontem à noite."},
		{"nl", "Goedemorgen, het water staat vandaag hoger dan gisteren en de sluis blijft dicht."},
		{"pl", "Dzień dobry, woda płynie spokojnie, a wszystkie turbiny pracują bez przerwy."},
		{"tr", "Günaydın, baraj gölündeki su seviyesi dün geceden beri yavaşça yükseliyor."},
		{"ru", "Доброе утро, вода поднялась за ночь, поэтому мы открыли второй затвор."},
		{"ar", "صباح الخير، ارتفع منسوب المياه خلال الليل وفتحنا البوابة الثانية."},
		{"ja", "おはようございます。昨夜から水位が上がったので、二番目の水門を開けました。"},
		{"en", "Could you please send me the inspection report for the north pipe by Friday?"},
		{"fr", "Pourriez-vous m'envoyer le rapport d'inspection de la conduite avant vendredi ?"},
		{"de", "Können Sie mir bitte den Prüfbericht für die nördliche Leitung bis Freitag schicken?"},
		{"es", "¿Podría enviarme el informe de inspección de la tubería norte antes del viernes?"},
		{"it", "Potrebbe inviarmi il rapporto di ispezione della condotta entro venerdì, per favore?"},
		{"pt", "Você poderia me enviar o relatório de inspeção da tubulação até sexta-feira?"},
		{"nl", "Kunt u mij het inspectierapport van de noordelijke leiding voor vrijdag sturen?"},
		{"pl", "Czy mógłbyś wysłać mi raport z przeglądu rurociągu przed piątkiem?"},
		{"tr", "Kuzey borusunun denetim raporunu cuma gününe kadar bana gönderebilir misiniz?"},
		{"ru", "Не могли бы вы прислать мне отчёт о проверке трубопровода до пятницы?"},
		{"ar", "هل يمكنك أن ترسل لي تقرير فحص الأنبوب قبل يوم الجمعة؟"},
		{"ja", "金曜日までに北側の配管の点検報告書を送っていただけますか。"},
	}
}

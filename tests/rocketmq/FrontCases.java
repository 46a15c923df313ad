import static java.nio.charset.StandardCharsets.UTF_8;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientException;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.TransactionChecker;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/** Uses a server with the official Java client, after the program of the page; each line of the output is a fact. */
public class FrontCases {
    static final ClientServiceProvider CLIENT = Shop.CLIENT;
    static final Duration MINUTE = Duration.ofMinutes(1);
    static ClientConfiguration configuration;

    public static void main(String[] arguments) throws Exception {
        Shop.main(arguments);
        configuration = ClientConfiguration.newBuilder().setEndpoints(arguments[0]).enableSsl(false).build();
        Set<String> asked = new HashSet<>();
        try (var producer = producer(message -> answer(message, asked), "orders", "steps", "later", "paid", "dead")) {
            send(producer);
            refuse(producer);
            choose(producer);
            giveBack(producer);
            die(producer);
            end(producer);
            receive();
        }
        inherit();
        say("pushed in order", push("steps", "billing", "second", 3));
        say("pushed", new TreeSet<>(push("orders", "hauling", "b", 5)));
        System.exit(0);
    }

    static Producer producer(TransactionChecker checker, String... topics) throws ClientException {
        return CLIENT.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics(topics)
                .setTransactionChecker(checker)
                .build();
    }

    /** Returns the answer to a question about a transaction by its body, perhaps not the first time. */
    static TransactionResolution answer(MessageView message, Set<String> asked) {
        var body = body(message);
        if (asked.add(body)) {
            if (body.equals("raises first")) {
                throw new IllegalStateException();
            } else if (body.equals("unknown first")) {
                return TransactionResolution.UNKNOWN;
            }
        }
        return body.equals("to be undone") ? TransactionResolution.ROLLBACK : TransactionResolution.COMMIT;
    }

    static void send(Producer producer) throws Exception {
        for (var body : List.of("first", "second")) {
            var receipt = producer.send(CLIENT.newMessageBuilder()
                    .setTopic("steps").setBody(body.getBytes(UTF_8)).setMessageGroup("group").setTag("tag")
                    .setKeys("key-1", "key-2").addProperty("name", "value").build());
            say("sent", body, receipt.getMessageId().getVersion());
        }
    }

    /** Does what the client or the server refuses. */
    static void refuse(Producer producer) throws Exception {
        say("25 hours", said(() -> producer.send(later(Duration.ofHours(25)))));
        say("no topic", said(() -> producer.send(Shop.message("nowhere", "1"))));
        say("another type", said(() -> producer.send(Shop.message("paid", "1"))));
        say("another type", said(() -> producer.send(Shop.message("dead", "1"), producer.beginTransaction())));
        say("4 MiB", said(() -> producer.send(Shop.message("dead", "x".repeat(4 * 1024 * 1024 + 1)))));
        say("tag", said(() -> producer.send(message("orders").setTag("a|b").build())));
        say("tag", said(() -> producer.send(message("orders").setTag("a\u0001").build())));
        say("key", said(() -> producer.send(message("orders").setKeys("a\u0001").build())));
        say("property", said(() -> producer.send(message("orders").addProperty("TAGS", "1").build())));
        var recalled = producer.send(later(Duration.ofSeconds(1)));
        say("recall", said(() -> producer.recallMessage("later", recalled.getRecallHandle())));
        say("recall", said(() -> producer.recallMessage("later", "garbage")));
        for (var wrong : List.of("a >", "a != 1", "a IN (1)")) {
            var chosen = new FilterExpression(wrong, FilterExpressionType.SQL92);
            try (var consumer = consumer("choosing-SQL92", "orders", chosen)) {
                say(wrong, said(() -> consumer.receive(1, MINUTE)));
            }
        }
        try (var consumer = consumer("choosing-TAG", "orders", FilterExpression.SUB_ALL)) {
            say("9 s", said(() -> consumer.receive(1, Duration.ofSeconds(9))));
        }
    }

    static MessageBuilder message(String topic) {
        return CLIENT.newMessageBuilder().setTopic(topic).setBody("1".getBytes(UTF_8));
    }

    static Message later(Duration delay) {
        var due = System.currentTimeMillis() + delay.toMillis();
        return CLIENT.newMessageBuilder()
                .setTopic("later").setBody("late".getBytes(UTF_8)).setDeliveryTimestamp(due).build();
    }

    /** Sends without waiting, and receives what a tag or a condition chooses. */
    static void choose(Producer producer) throws Exception {
        for (var tag : List.of("a", "b", "c")) {
            producer.sendAsync(CLIENT.newMessageBuilder()
                    .setTopic("orders").setBody(tag.getBytes(UTF_8)).setTag(tag)
                    .addProperty("size", "" + (int) tag.charAt(0)).build()).get();
        }
        var byTag = new FilterExpression("a || c");
        var bySize = new FilterExpression("size > 97 AND TAGS <> 'c'", FilterExpressionType.SQL92);
        for (var chosen : List.of(byTag, bySize)) {
            try (var consumer = consumer("choosing-" + chosen.getFilterExpressionType(), "orders", chosen)) {
                var bodies = new TreeSet<String>();
                for (var message : consumer.receive(32, MINUTE)) {
                    bodies.add(body(message));
                    consumer.ack(message);
                }
                say("chosen", chosen.getExpression(), bodies);
            }
        }
    }

    /** Receives a delayed message, gives it back, and acknowledges it by the old handle and by the new one. */
    static void giveBack(Producer producer) throws Exception {
        try (var consumer = consumer("giving-back", "later", FilterExpression.SUB_ALL)) {
            var first = some(consumer).get(0);
            consumer.changeInvisibleDuration(first, Duration.ZERO);
            var second = some(consumer).get(0);
            say("stale", said(() -> consumer.ack(first)));
            say("fresh", said(() -> consumer.ack(second)));
            say("again", said(() -> consumer.ack(second)));
            say("given back", body(second), first.getDeliveryAttempt(), second.getDeliveryAttempt());
        }
    }

    /** Gives a message back until it does not come again, and receives the one behind it. */
    static void die(Producer producer) throws Exception {
        producer.send(Shop.message("dead", "dead"));
        try (var consumer = consumer("dying", "dead", FilterExpression.SUB_ALL)) {
            for (int attempts = 0; attempts < 3; attempts++) {
                var message = some(consumer).get(0);
                say("dying", body(message), message.getDeliveryAttempt());
                consumer.changeInvisibleDuration(message, Duration.ZERO);
            }
            producer.send(Shop.message("dead", "behind"));
            for (var message : some(consumer)) {
                say("dying", body(message), said(() -> consumer.ack(message)));
            }
            say("dying", consumer.receive(1, MINUTE).size());
        }
    }

    static SimpleConsumer consumer(String group, String topic, FilterExpression chosen) throws ClientException {
        return CLIENT.newSimpleConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(group)
                .setAwaitDuration(Duration.ofSeconds(5))
                .setSubscriptionExpressions(Map.of(topic, chosen))
                .build();
    }

    /** Receives until there is something. */
    static List<MessageView> some(SimpleConsumer consumer) throws ClientException {
        List<MessageView> found = List.of();
        while (found.isEmpty()) {
            found = consumer.receive(32, MINUTE);
        }
        return found;
    }

    /** Ends transactions in each way, once and twice, and leaves others to questions. */
    static void end(Producer producer) throws Exception {
        for (var verdicts : List.of("commit", "rollback", "commit commit", "rollback rollback", "commit rollback",
                "rollback commit", "left", "unknown first", "raises first", "to be undone")) {
            var transaction = producer.beginTransaction();
            producer.send(Shop.message("paid", verdicts), transaction);
            List<String> answers = new ArrayList<>();
            for (var verdict : verdicts.split(" ")) {
                if (verdict.equals("commit")) {
                    answers.add(said(transaction::commit));
                } else if (verdict.equals("rollback")) {
                    answers.add(said(transaction::rollback));
                }
            }
            say("ended", verdicts, answers);
        }
    }

    /** Receives with a simple consumer what is delivered of transactions, and how often the producer was asked. */
    static void receive() throws Exception {
        try (var consumer = consumer("accounts", "paid", FilterExpression.SUB_ALL)) {
            var all = new TreeMap<String, String>();
            while (all.size() < 6) {
                for (var message : some(consumer)) {
                    consumer.ack(message);
                    all.put(body(message), message.getProperties().getOrDefault("TRANSACTION_CHECK_TIMES", "not asked"));
                }
            }
            say("received", all, consumer.receive(1, MINUTE).size());
        }
    }

    /** Leaves a transaction to another producer of the topic. */
    static void inherit() throws Exception {
        try (var gone = producer(message -> TransactionResolution.ROLLBACK, "left")) {
            gone.send(Shop.message("left", "left"), gone.beginTransaction());
        }
        try (var heir = producer(message -> TransactionResolution.COMMIT, "left");
                var consumer = consumer("heirs", "left", FilterExpression.SUB_ALL)) {
            for (var message : some(consumer)) {
                say("inherited", body(message), said(() -> consumer.ack(message)));
            }
        }
    }

    /** Receives with a push consumer, which fails once for a body. */
    static List<String> push(String topic, String group, String fails, int calls) throws Exception {
        var lines = Collections.synchronizedList(new ArrayList<String>());
        var all = new CountDownLatch(calls);
        try (var consumer = CLIENT.newPushConsumerBuilder()
                .setClientConfiguration(configuration)
                .setConsumerGroup(group)
                .setSubscriptionExpressions(Map.of(topic, FilterExpression.SUB_ALL))
                .setMessageListener(message -> {
                    lines.add(body(message) + " " + message.getDeliveryAttempt() + " " + message.getTag().orElse("-")
                            + " " + new TreeSet<>(message.getKeys()) + " " + message.getMessageGroup().orElse("-")
                            + " " + new TreeMap<>(message.getProperties()));
                    all.countDown();
                    boolean isFailure = body(message).equals(fails) && message.getDeliveryAttempt() == 1;
                    return isFailure ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
                })
                .build()) {
            all.await();
        }
        return lines;
    }

    /** Returns how a call ends: OK, or an error in the words of RocketMQ, without what a front adds in brackets. */
    static String said(Call call) {
        try {
            call.make();
            return "OK";
        } catch (Exception refusal) {
            return refusal.getMessage().replaceAll("(?s)request-id=[^,]*, |(?<=[^]]) \\[.*", "").replace('\n', ' ');
        }
    }

    interface Call {
        void make() throws Exception;
    }

    static String body(MessageView message) {
        return UTF_8.decode(message.getBody()).toString();
    }

    static synchronized void say(Object... facts) {
        System.out.println(List.of(facts));
    }
}
